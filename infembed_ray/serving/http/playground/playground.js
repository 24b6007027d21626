// The playground: one query, two instructions, their rankings side by side.
//
// Both rankings come from one version of the index. Answers are shown as text, never as markup.
// The API key is kept in `apiKey` only: neither in the URL nor in storage.

import { $, choose, chosen, element, stateOf } from "./page.js";
import { SIDES, layout, reveal, searched, setLayout, show, single } from "./results.js";
import { SNIPPETS, toClipboard } from "./snippets.js";
import { SAMPLE, instructionsFor, questionFrom } from "./suggestions.js";

const MOST_RETRIES = 5;
const DEFAULT_COLLECTION = "index";

let apiKey = "";
let cards = []; // name and model of each collection that the key may use
let collection = DEFAULT_COLLECTION; // that is searched
let running = null; // AbortController of the request in flight
let retry = null; // timer of the next attempt

// ------------------------------------------------------------------------------------------------ the request

const path = (what = "search") => (collection === DEFAULT_COLLECTION ? `v1/${what}`
  : `v1/collections/${encodeURIComponent(collection)}/${what}`);

const two = () => chosen("compare") === "two";

/** The form as it stands, under the names that the address gives its parts. */
function question() {
  return {
    q: $("query").value, ...(two() && { a: $("instruction-a").value }), b: $("instruction-b").value,
    filter: $("filter").value, k: $("top-k").value, ...(collection !== DEFAULT_COLLECTION && { c: collection }),
    ...layout(),
  };
}

function fill({ q = "", a, b = "", filter = "", k = "10", c = DEFAULT_COLLECTION, ...look }) {
  choose("compare", a === undefined ? "one" : "two");
  const values = { query: q, "instruction-a": a ?? "", "instruction-b": b, filter, "top-k": k };
  for (const [id, value] of Object.entries(values)) $(id).value = value;
  $("filters").open = Boolean(filter);
  setLayout(look);
  compare();
  if (c !== collection) chooseCollection(c);
}

const titled = (query) => `${query && `${query} · `}infembed playground`;

function compare() {
  $("ask").classList.toggle("two", two());
  $("label-b").textContent = two() ? "Second instruction" : "Instruction";
}

/** The bodies for POST /v1/search, one for each ranking; null with the fault told at its field. */
function bodies({ q, a, b, filter, k }) {
  if (!q.trim()) return fault("query", "Type what the passages should be about.");
  let conditions = null;
  try {
    conditions = filter.trim() ? JSON.parse(filter) : null;
  } catch (error) {
    return fault("filter", `This is not JSON: ${error.message}`);
  }
  return [a, b].map((text) => ({
    query: q, ...(text?.trim() && { instruction: text.trim() }), top_k: Number(k),
    ...(conditions !== null && { filter: conditions }),
  }));
}

/** Say at a field what is wrong with it, and go there. */
function fault(id, message) {
  $(`${id}-fault`).textContent = message;
  $(id).closest("details")?.setAttribute("open", "");
  $(id).setAttribute("aria-invalid", "true");
  $(id).focus();
  return null;
}

function clearFaults() {
  for (const p of document.querySelectorAll(".fault")) p.textContent = "";
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}

/** The field that the server means by `param`. */
function fieldOf({ param, side }) {
  const name = (param ?? "").split(".")[0];
  if (name === "instruction") return `instruction-${side}`;
  return { query: "query", filter: "filter", top_k: "top-k" }[name];
}

// --------------------------------------------------------------------------------------------------- the server

const UNREACHABLE = 0; // in place of a status

class Refusal extends Error {
  constructor(status, { message, param = null }, retryAfter = null) {
    super(message);
    Object.assign(this, { status, param, retryAfter });
  }
}

async function call(path, options = {}) {
  const headers = { ...(apiKey && { Authorization: `Bearer ${apiKey}` }), "Content-Type": "application/json" };
  const response = await fetch(path, { ...options, headers }).catch(() => {
    throw new Refusal(UNREACHABLE, { message: "Is it running, and are you online?" });
  });
  const answer = await response.json().catch(() => null);
  if (response.ok && answer) return answer;
  const said = answer?.error ?? { message: `It answered ${response.status} without a reason.` };
  throw new Refusal(response.status, said, seconds(response.headers.get("Retry-After")));
}

/** Seconds of a Retry-After, which may be a date. */
function seconds(value) {
  if (!value) return null;
  const wait = Number.isFinite(Number(value)) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(wait) ? Math.max(1, Math.ceil(wait)) : null;
}

/** Offer the collections that the key may use, and present the one that is searched. */
async function introduce() {
  try {
    cards = (await call("v1/collections")).data;
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    if (error.status === 401) askForKey(error);
    return; // a search reports any other error
  }
  if (!cards.length) return; // the key is for collections that are not served
  $("collections").hidden = cards.length < 2;
  $("collection").replaceChildren(...cards.map(({ name }) => new Option(name, name)));
  chooseCollection(cards.some(({ name }) => name === collection) ? collection : cards[0].name);
}

function chooseCollection(name) {
  collection = name;
  const card = cards.find((one) => one.name === name)?.model;
  if (!card) return; // not known yet, or unknown to the server too: a search reports it
  $("collection").value = name;
  present(card);
}

/** Tell what is served, and which fields a filter may name. */
function present(card) {
  $("served").textContent = `${card.id} · ${card.passages.toLocaleString("en")} passages`;
  const fields = Object.entries(card.metadata);
  $("fields").replaceChildren(...(fields.length ? ["Fields: "] : []), ...fields.map(([name, type]) =>
    chip(`${name} ${type}`, () => beginCondition(name, type))));
}

function chip(text, act) {
  const button = Object.assign(element("button", "chip", text), { type: "button" });
  button.addEventListener("click", act);
  return button;
}

const NOW = new Date().toISOString();
const EXAMPLES = { string: "", integer: 0, number: 0, boolean: true, date: NOW.slice(0, 10), datetime: NOW };

/** Begin a condition on a field: in the filter, with the value selected that is to be typed. */
function beginCondition(name, type) {
  const filter = $("filter");
  const value = JSON.stringify(EXAMPLES[type] ?? "");
  const others = filter.value.trim().replace(/^\{/, "").replace(/\}$/, "").trim();
  const start = `{${JSON.stringify(name)}: `;
  filter.value = `${start}${value}${others && ", "}${others}}`;
  filter.focus();
  const quote = value.startsWith('"') ? 1 : 0;
  filter.setSelectionRange(start.length + quote, start.length + value.length - quote);
}

/** Ask; `address` says whether the question goes into the page's address. */
async function search({ attempt = 0, address = true } = {}) {
  forget();
  clearFaults();
  const asked = question();
  const requests = bodies(asked);
  if (!requests) return;
  const fragment = `#${new URLSearchParams(Object.entries(asked).filter(([name, value]) => value || name === "a"))}`;
  if (address && fragment !== location.hash) history.pushState(null, "", fragment);
  document.title = titled(asked.q);
  const to = path();
  running?.abort();
  const mine = running = new AbortController();
  busy(true);
  const began = performance.now();
  try {
    const ask = (body, signal) => call(to, { method: "POST", body: JSON.stringify(body), signal });
    const found = await Promise.all(requests.map((request, i) => ask(request, mine.signal).catch((error) => {
      throw Object.assign(error, { side: SIDES[i] });
    })));
    if (found[0].index_version !== found[1].index_version) {
      throw new Refusal(503, { message: "The index changed between the two rankings." }, 1);
    }
    show({ requests, path: to, found, roundTrip: performance.now() - began, ask });
    suggest(found[0].hits);
  } catch (error) {
    if (mine.signal.aborted) return;
    if (!(error instanceof Refusal)) throw error;
    refuse(error, attempt);
  } finally {
    if (running === mine) busy(false);
  }
}

/** Offer instructions for the query: a chip shows one, the only thing that differs. */
function suggest(hits) {
  $("suggestions").replaceChildren(...instructionsFor(hits).map((instruction) => element("li", "", chip(instruction, () => {
    $("instruction-b").value = instruction;
    search();
  }))));
}

/** Begin with a question from the index, so that the page shows what an instruction does. */
async function begin() {
  const sample = await call(path(), { method: "POST", body: JSON.stringify(SAMPLE) }).catch(refuse);
  const query = sample && questionFrom(sample.hits);
  if (!query || $("query").value) return; // typed meanwhile
  fill({ ...question(), q: query, b: instructionsFor(sample.hits)[0] });
  $("query").select();
  await search({ address: false });
}

function busy(now) {
  $("results").setAttribute("aria-busy", now);
  $("search").textContent = now ? "Searching" : "Search";
  if (now) {
    $("trouble").hidden = true;
    $("trouble-title").textContent = $("trouble-message").textContent = "";
  }
}

// ------------------------------------------------------------------------------------------------ errors

const TITLES = {
  [UNREACHABLE]: "The server cannot be reached.",
  413: "That is too much for one request.", 429: "The server is busy.", 500: "Something failed in the server.",
  503: "The server cannot answer now.", 504: "The answer took too long.",
};

function refuse(error, attempt = MOST_RETRIES) {
  if (error.status === 401) return askForKey(error);
  const field = error.status === 400 && fieldOf(error);
  if (field) return fault(field, error.message);
  $("trouble-title").textContent = TITLES[error.status] ?? "The server rejected the request.";
  $("trouble-message").textContent = error.message;
  $("trouble").hidden = false;
  reveal(null); // the results on the page belong to another query
  if (error.retryAfter && attempt < MOST_RETRIES) countDown(error.retryAfter, attempt + 1);
}

/** Not a live region: the alert has been spoken once. */
function countDown(left, attempt) {
  $("countdown").textContent = left > 0 ? `Trying again in ${left} s.` : "";
  if (left > 0) retry = setTimeout(() => countDown(left - 1, attempt), 1000);
  else search({ attempt });
}

/** No further attempt at what failed: the question is another one now. */
function forget() {
  clearTimeout(retry);
  $("countdown").textContent = "";
}

/** Without a key that the server accepts, the question cannot be asked. */
function askForKey(refusal) {
  $("key-form").hidden = false;
  $("ask").inert = Boolean(refusal);
  if (refusal && apiKey) fault("key", refusal.message);
  else $("key").focus();
}

async function copy(button) {
  const side = button.closest(".ranking").classList.contains("a") ? "a" : "b";
  const text = SNIPPETS[button.dataset.copy](single(side), Boolean(apiKey), searched());
  button.dataset.label ??= button.textContent;
  button.textContent = (await toClipboard(text)) ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}

// ------------------------------------------------------------------------------------------------ start

$("ask").addEventListener("submit", (event) => { event.preventDefault(); search(); });
for (const side of SIDES) {
  $(`instruction-${side}`).addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    search();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.defaultPrevented) return;
  event.preventDefault();
  search();
});
$("compare").addEventListener("change", compare);
$("collection").addEventListener("change", ({ target }) => {
  chooseCollection(target.value);
  if ($("query").value) search();
});
$("ask").addEventListener("input", forget);
$("again").addEventListener("click", () => search());
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  clearFaults();
  const given = $("key").value.trim();
  if (!/^[!-~]+$/.test(given)) return fault("key", "A key consists of ASCII letters, digits and punctuation.");
  apiKey = given;
  $("key").value = "";
  $("key-form").hidden = true;
  $("ask").inert = false;
  $("change-key").hidden = false;
  $("query").focus();
  await introduce();
  if (!$("ask").inert) await ($("query").value ? search() : begin());
});
$("change-key").addEventListener("click", () => {
  if ($("key-form").hidden) askForKey();
  else $("key-form").hidden = true;
});
$("rankings").addEventListener("click", ({ target }) => { if (target.dataset.copy) copy(target); });

/** Show what the address asks for, once the server accepts requests. */
function arrive() {
  fill(stateOf());
  document.title = titled($("query").value);
  if ($("ask").inert) return;
  if ($("query").value) return search({ address: false });
  forget();
  running?.abort();
  $("trouble").hidden = true;
  reveal("welcome");
  $("query").focus();
  return begin();
}

window.addEventListener("popstate", arrive);
await introduce();
await arrive();
