// The playground: one query, two instructions, their rankings side by side.
//
// Both rankings come from one request, and so from one version of the index. Answers are shown as text, never as markup.
// The API key is kept in `apiKey` only: neither in the URL nor in storage.

const $ = (id) => document.getElementById(id);
const SIDES = ["a", "b"];
const MOST_RETRIES = 5;

let apiKey = "";
let running = null; // AbortController of the request in flight
let shown = null; // {request, moves} of the answer that the page shows
let retry = null; // timer of the next attempt

// ------------------------------------------------------------------------------------------------ the request

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const choose = (name, value) => { document.querySelector(`input[name=${name}][value="${value}"]`).checked = true; };
const two = () => chosen("compare") === "two";

/** The form as it stands, under the names that the address gives its parts. */
function question() {
  return {
    q: $("query").value, ...(two() && { a: $("instruction-a").value }), b: $("instruction-b").value,
    filter: $("filter").value, k: $("top-k").value,
  };
}

function fill({ q = "", a, b = "", filter = "", k = "10" }) {
  choose("compare", a === undefined ? "one" : "two");
  const values = { query: q, "instruction-a": a ?? "", "instruction-b": b, filter, "top-k": k };
  for (const [id, value] of Object.entries(values)) $(id).value = value;
  compare();
}

const titled = (query) => `${query && `${query} · `}infembed playground`;

function compare() {
  $("ask").classList.toggle("two", two());
}

/** The body for POST /v1/search; null with the fault told at its field. */
function body({ q, a, b, filter, k }) {
  if (!q.trim()) return fault("query", "Type what the passages should be about.");
  let conditions = null;
  try {
    conditions = filter.trim() ? JSON.parse(filter) : null;
  } catch (error) {
    return fault("filter", `This is not JSON: ${error.message}`);
  }
  const instruction = [a, b].map((text) => text?.trim() || null);
  return { query: [q, q], instruction, top_k: Number(k), ...(conditions !== null && { filter: conditions }) };
}

/** Say at a field what is wrong with it, and go there. */
function fault(id, message) {
  $(`${id}-fault`).textContent = message;
  $(id).setAttribute("aria-invalid", "true");
  $(id).focus();
  return null;
}

function clearFaults() {
  for (const p of document.querySelectorAll(".fault")) p.textContent = "";
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}

/** The field that the server means by `param`; the instruction that is meant is told in the message. */
function fieldOf({ param, message }) {
  const name = (param ?? "").split(".")[0];
  if (name === "instruction") return two() && message.startsWith("instruction.0") ? "instruction-a" : "instruction-b";
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

/** Tell what is served, and which fields a filter may name. */
async function introduce() {
  let card;
  try {
    card = (await call("v1/models")).data[0];
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    if (error.status === 401) askForKey(apiKey && error.message);
    return; // a search reports any other error
  }
  $("served").textContent = `${card.id} · ${card.passages.toLocaleString("en")} passages`;
  const fields = Object.entries(card.metadata);
  $("fields").replaceChildren(...(fields.length ? ["Fields: "] : []), ...fields.map(([name, type]) => {
    const chip = element("button", "chip", `${name} ${type}`);
    chip.type = "button";
    chip.addEventListener("click", () => beginCondition(name, type));
    return chip;
  }));
}

const EXAMPLES = { string: "", integer: 0, number: 0, boolean: true, date: new Date().toISOString().slice(0, 10) };

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
  const request = body(asked);
  if (!request) return;
  const fragment = `#${new URLSearchParams(Object.entries(asked).filter(([name, value]) => value || name === "a"))}`;
  if (address && fragment !== location.hash) history.pushState(null, "", fragment);
  document.title = titled(asked.q);
  running?.abort();
  const mine = running = new AbortController();
  busy(true);
  const began = performance.now();
  try {
    const found = await call("v1/search", { method: "POST", body: JSON.stringify(request), signal: mine.signal });
    show({ request, found, roundTrip: performance.now() - began });
  } catch (error) {
    if (mine.signal.aborted) return;
    if (!(error instanceof Refusal)) throw error;
    refuse(error, attempt);
  } finally {
    if (running === mine) busy(false);
  }
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

function refuse(error, attempt) {
  if (error.status === 401) return askForKey(apiKey && error.message);
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

function askForKey(message) {
  $("key-form").hidden = false;
  if (message) fault("key", message);
  else $("key").focus();
}

// ------------------------------------------------------------------------------------------------ results

const element = (name, className = "", textContent = "") =>
  Object.assign(document.createElement(name), { className, textContent });
const share = (score, best) => (best > 0 ? Math.max(0, score / best) : 0);
const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;

/** Where every passage of either ranking stands in both: id -> {a, b}, from 1, undefined where it is not found. */
function places([a, b]) {
  const all = new Map();
  for (const [side, hits] of [["a", a], ["b", b]]) {
    hits.forEach(({ id }, i) => all.set(id, { ...all.get(id), [side]: i + 1 }));
  }
  return all;
}

/** What becomes of a passage from ranking A to B: a class, a mark, and words for it. */
function move({ a, b }) {
  if (!a) return { kind: "up", mark: "new", words: "not in the other ranking" };
  if (!b) return { kind: "down", mark: "gone", words: "not in the other ranking" };
  if (a === b) return { kind: "same", mark: "=", words: "same place in both" };
  const by = Math.abs(a - b);
  const words = `${by} ${by === 1 ? "place" : "places"} ${b < a ? "up" : "down"}, from ${a} to ${b}`;
  return b < a ? { kind: "up", mark: `▲ ${by}`, words } : { kind: "down", mark: `▼ ${by}`, words };
}

function show({ request, found, roundTrip }) {
  const rankings = found.results.map(({ hits }) => hits);
  const moves = new Map([...places(rankings)].map(([id, place]) => [id, { ...place, ...move(place) }]));
  const best = Math.max(0, ...rankings.flat().map(({ score }) => score));
  shown = { request, moves };
  $("summary").textContent = summary(request, rankings, [...moves.values()]);
  const facts = {
    Encode: ms(found.timings.encode_ms), Search: ms(found.timings.search_ms), "Round trip": ms(roundTrip),
    Model: found.model, Index: found.index_version,
  };
  $("facts").replaceChildren(...Object.entries(facts).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    return pair;
  }));
  SIDES.forEach((side, i) => {
    const title = request.instruction[i] ?? "Without an instruction";
    $(`heading-${side}`).replaceChildren(element("span", "", title));
    $(`heading-${side}`).title = title;
    $(`show-${side}`).textContent = request.instruction[i] ?? "Without";
    const items = rankings[i].map((hit, at) => item(hit, at + 1, moves.get(hit.id), share(hit.score, best)));
    $(`hits-${side}`).replaceChildren(...(items.length ? items : [element("li", "none", "No passages.")]));
  });
  reveal("rankings");
  clamp();
  draw();
}

/** What the lower half of the page holds: the welcome, the rankings, or neither. */
function reveal(part) {
  $("welcome").hidden = part !== "welcome";
  for (const id of ["facts", "show", "rankings"]) $(id).hidden = part !== "rankings";
  if (part !== "rankings") $("summary").textContent = "";
}

function summary({ instruction }, [a, b], moves) {
  if (!a.length && !b.length) return "Nothing found.";
  const count = (test) => moves.filter(test).length;
  const moved = count((m) => m.a && m.b && m.a !== m.b);
  const fresh = count((m) => !m.a);
  const gone = count((m) => !m.b);
  if (!moved && !fresh && !gone) {
    return `Both rankings are the same${instruction[0] === instruction[1] ? ", as their instructions are" : ""}.`;
  }
  const kinds = { stay: moves.length - moved - fresh - gone, move: moved, new: fresh, gone };
  return `${Object.entries(kinds).filter(([, n]) => n).map(([kind, n]) => `${n} ${kind}`).join(", ")}.`;
}

function item(hit, rank, { kind, mark, words }, length) {
  const li = $("hit").content.cloneNode(true).firstElementChild;
  const part = (name) => li.querySelector(`.${name}`);
  li.dataset.id = hit.id;
  part("rank").textContent = rank;
  part("score").textContent = hit.score.toFixed(3);
  part("score").style.setProperty("--length", length);
  part("id").textContent = part("id").title = hit.id;
  part("move").textContent = mark;
  part("move").classList.add(kind);
  part("move").title = words;
  part("move").setAttribute("role", "img");
  part("move").setAttribute("aria-label", words);
  part("text").textContent = hit.text;
  part("more").addEventListener("click", ({ currentTarget: button }) => {
    const whole = part("text").classList.toggle("whole");
    button.setAttribute("aria-expanded", whole);
    button.textContent = more(whole, hit.text);
  });
  part("more").textContent = more(false, hit.text);
  for (const [name, value] of Object.entries(hit.metadata)) {
    if (value === null) continue;
    const chip = element("li");
    chip.append(element("span", "", `${name} `), element("bdi", "", String(value)));
    part("metadata").append(chip);
  }
  return li;
}

const more = (whole, text) => (whole ? "Show less" : `Show all ${text.length.toLocaleString("en")} characters`);

/** Offer the rest of those passages that are cut off. */
function clamp() {
  const seen = [...document.querySelectorAll(".ranking .text:not(.whole)")].filter((text) => text.clientHeight);
  const fits = seen.map((text) => text.scrollHeight <= text.clientHeight + 1); // all read before any is written
  seen.forEach((text, i) => { text.parentElement.querySelector(".more").hidden = fits[i]; });
}

// ------------------------------------------------------------------------------------------------ rank moves, drawn

const svg = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

const STUB = 18; // pixels

/** A line for every passage from its place in A to its place in B; a stub where it has only one. */
function draw() {
  const frame = $("moves").getBoundingClientRect();
  if (!shown || !frame.width) return;
  const heights = SIDES.map((side) => [...$(`hits-${side}`).children].map((li) => {
    const head = li.querySelector(".head")?.getBoundingClientRect();
    return head && head.top + head.height / 2 - frame.top;
  }));
  const [left, right] = [7, frame.width - 7];
  $("moves").replaceChildren(...[...shown.moves].map(([id, { a, b, kind }]) => {
    const [from, to] = [heights[0][a - 1], heights[1][b - 1]];
    const line = svg("g", { class: a && b ? kind : `${kind} stub` });
    line.dataset.id = id;
    const middle = frame.width / 2;
    const ends = [...(a ? [[left, from]] : []), ...(b ? [[right, to]] : [])];
    const path = !b ? `M${left} ${from}h${STUB}` : !a ? `M${right} ${to}h${-STUB}`
      : `M${left} ${from}C${middle} ${from} ${middle} ${to} ${right} ${to}`;
    line.append(svg("path", { d: path }), ...ends.map(([cx, cy]) => svg("circle", { cx, cy, r: 3.5 })));
    return line;
  }));
}

/** Make one passage stand out in both rankings. */
function light(id) {
  $("rankings").classList.toggle("lit", id !== undefined);
  for (const part of $("rankings").querySelectorAll("[data-id]")) part.classList.toggle("lit", part.dataset.id === id);
}

// ------------------------------------------------------------------------------------------------ copied requests

const KEY_VARIABLE = "INFEMBED_API_KEY";
const absolute = (path) => new URL(path, document.baseURI).href;

/** The request that gives one of the two rankings alone. */
function single(side) {
  const { query, instruction, ...rest } = shown.request;
  const i = SIDES.indexOf(side);
  return { query: query[i], ...(instruction[i] && { instruction: instruction[i] }), ...rest };
}

const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;

const SNIPPETS = {
  curl: (request) => [
    `curl -s ${quoted(absolute("v1/search"))}`,
    ...(apiKey ? [`-H "Authorization: Bearer $${KEY_VARIABLE}"`] : []),
    "-H 'Content-Type: application/json'",
    `-d ${quoted(JSON.stringify(request))}`,
  ].join(" \\\n  "),
  python: (request) => [
    ...(apiKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(absolute("v1"))}, api_key=${apiKey ? `os.environ["${KEY_VARIABLE}"]` : '"-"'})`,
    `found = client.post("/search", cast_to=object, body=${python(request)})`,
    'for hit in found["hits"]:',
    `    print(f"{hit['score']:.3f}  {hit['id']}  {hit['text']}")`,
    "",
  ].join("\n"),
};

/** A value of JSON as Python writes it. */
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([key, item]) => `${python(key)}: ${python(item)}`).join(", ")}}`;
}

async function copy(button) {
  const text = SNIPPETS[button.dataset.copy](single(button.closest(".ranking").classList.contains("a") ? "a" : "b"));
  button.dataset.label ??= button.textContent;
  button.textContent = (await toClipboard(text)) ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // browsers deny the clipboard to pages from plain HTTP
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

// ------------------------------------------------------------------------------------------------ start

function theme(value) {
  document.documentElement.dataset.theme = value;
  choose("theme", value);
}

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
$("ask").addEventListener("input", forget);
$("again").addEventListener("click", () => search());
$("suggestions").addEventListener("click", ({ target }) => {
  if (target.matches("button")) $("instruction-b").value = target.textContent;
  $($("query").value ? "instruction-b" : "query").focus();
});
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  clearFaults();
  const given = $("key").value.trim();
  if (!/^[!-~]+$/.test(given)) return fault("key", "A key consists of ASCII letters, digits and punctuation.");
  apiKey = given;
  $("key").value = "";
  $("key-form").hidden = true;
  $("change-key").hidden = false;
  $("query").focus();
  await introduce();
  if ($("key-form").hidden && $("query").value) search();
});
$("change-key").addEventListener("click", () => {
  if ($("key-form").hidden) askForKey();
  else $("key-form").hidden = true;
});
$("skip").addEventListener("click", (event) => { event.preventDefault(); $("results").focus(); });
$("show").addEventListener("change", () => { $("rankings").dataset.show = chosen("show"); clamp(); });
$("rankings").dataset.show = "b";
$("rankings").addEventListener("click", ({ target }) => { if (target.dataset.copy) copy(target); });
for (const [type, on] of [["pointerover", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) {
  $("rankings").addEventListener(type, ({ target }) => light(on ? target.closest("[data-id]")?.dataset.id : undefined));
}
const resized = new ResizeObserver(() => { clamp(); draw(); });
for (const side of SIDES) resized.observe($(`hits-${side}`));
$("theme").addEventListener("change", () => {
  theme(chosen("theme"));
  try { localStorage.setItem("theme", chosen("theme")); } catch { /* storage is off: it lasts as long as the page */ }
});

/** Show what the address asks for. */
function arrive() {
  fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  document.title = titled($("query").value);
  if ($("query").value) return search({ address: false });
  forget();
  running?.abort();
  $("trouble").hidden = true;
  reveal("welcome");
  $("query").focus();
}

let kept = "";
try { kept = localStorage.getItem("theme") ?? ""; } catch { /* as above */ }
if (["light", "dark"].includes(kept)) theme(kept);
window.addEventListener("popstate", arrive);
arrive();
await introduce();
