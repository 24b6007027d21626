// What both pages share: the state in the address, requests, and pages of rows.

import { $, element, stateOf } from "../playground/page.js";

export const count = (value) => value.toLocaleString("en");

/** Text of unknown language; long ones are cut until their card is opened. */
export function text(value, className = "text", words = [], tag = "p") {
  const made = element(tag, className, ...marked(value, words));
  made.dir = "auto";
  return made;
}

/** The text with the found words in <mark>. */
function marked(value, words) {
  if (!words.length) return [value];
  const pattern = new RegExp(`(${words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "giu");
  return value.split(pattern).map((part, i) => (i % 2 ? element("mark", "", part) : part));
}

/** Options of a select, with the chosen one; `first` is the option without a value. */
export function options(select, values, chosen, first = null) {
  const all = first === null ? values : [{ value: "", label: first }, ...values];
  select.replaceChildren(...all.map(({ value, label }) => new Option(label, value, false, value === chosen)));
}

/** A button that shows the texts of a card as a whole; absent where none is cut. */
function addOpener(card) {
  const cut = [...card.querySelectorAll(".text")].some((p) => p.scrollHeight > p.clientHeight + 1);
  if (!cut) return;
  const button = element("button", "quiet opener", "Show whole texts");
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const open = card.classList.toggle("open");
    button.setAttribute("aria-expanded", open);
    button.textContent = open ? "Show less" : "Show whole texts";
  });
  card.append(button);
}

let running = null; // AbortController of the request in flight

async function fetchRows(state, signal) {
  const response = await fetch(`rows?${new URLSearchParams(state)}`, { signal }).catch((error) => {
    if (signal.aborted) throw error;
    throw new Error("The server cannot be reached. Is `infembed view` still running?");
  });
  const answer = await response.json().catch(() => null);
  if (response.ok && answer) return answer;
  throw new Error(answer?.error?.message ?? `The server answered ${response.status}.`);
}

/** Keep a state in the address, without empty values, and show it. */
export function go(state, show) {
  const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== undefined);
  const fragment = `#${new URLSearchParams(kept)}`;
  if (fragment !== (location.hash || "#")) history.pushState(null, "", fragment);
  return load(show);
}

async function load(show) {
  running?.abort();
  const mine = running = new AbortController();
  $("results").setAttribute("aria-busy", "true");
  $("trouble").hidden = true;
  $("trouble").textContent = "";
  try {
    const began = performance.now();
    const state = stateOf();
    const answer = await fetchRows(state, mine.signal);
    show(answer, state, performance.now() - began);
    for (const card of document.querySelectorAll(".card")) addOpener(card);
    turn(Number(state.page ?? 1), answer.pages);
  } catch (error) {
    if (mine.signal.aborted) return;
    $("trouble").hidden = false;
    $("trouble").textContent = error.message;
    $("rows").replaceChildren();
    $("summary").textContent = "";
    turn(1, 0);
  } finally {
    if (running === mine) $("results").setAttribute("aria-busy", "false");
  }
}

/** The links to the pages before and after this one. */
function turn(page, pages) {
  $("pages").hidden = pages < 2 && page === 1;
  $("place").textContent = `Page ${count(page)} of ${count(pages)}`;
  for (const [id, to, valid] of [["previous", page - 1, page > 1], ["next", page + 1, page < pages]]) {
    $(id).disabled = !valid;
    $(id).value = to;
  }
}

/** Show what the address asks for, now and whenever it changes. */
export function start(show) {
  for (const id of ["previous", "next"]) {
    $(id).addEventListener("click", async () => {
      await go({ ...stateOf(), page: $(id).value }, show);
      $("results").focus();
      window.scrollTo(0, $("results").offsetTop - 16);
    });
  }
  window.addEventListener("popstate", () => load(show));
  return load(show);
}
