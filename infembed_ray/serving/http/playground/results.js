// The answer on the page: both rankings, how each passage moved between them, and the switch from one to the other.

import { explaining, forgetExplanations, offer } from "./explanation.js";
import { $, choose, chosen, element, lead, pairs, stateOf } from "./page.js";

export const SIDES = ["a", "b"];

const MOVE_MS = 500;
const MOVED = "Moved: the result has another rank than in the first ranking, or is not in it (entered). " +
  "Results of the first ranking only (left) are not counted.";

const narrow = matchMedia("(max-width: 52rem)"); // as in the stylesheet: one ranking at a time
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const LEAD = 100; // characters of a passage in the compact view, at most

let shown = null; // {requests, path, moves} of the answer that the page shows

const share = (score, best) => (best > 0 ? Math.max(0, score / best) : 0);
const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

/** The request that gave one of the two rankings. */
export const single = (side) => shown.requests[SIDES.indexOf(side)];

/** The path that the answer came from. */
export const searched = () => shown.path;

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
  if (!a) return { kind: "up", mark: "new", words: "entered: not in the other ranking" };
  if (!b) return { kind: "down", mark: "left", words: "left: not in the other ranking" };
  if (a === b) return { kind: "same", mark: "=", words: "same place in both" };
  const by = Math.abs(a - b);
  const words = `${counted(by, "place")} ${b < a ? "up" : "down"}, from ${a} to ${b}`;
  return b < a ? { kind: "up", mark: `▲ ${by}`, words } : { kind: "down", mark: `▼ ${by}`, words };
}

/** Show two answers from a path; `roundTrip` is the time in ms that they took, and `ask` sends further requests there. */
export function show({ requests, path, found, roundTrip, ask }) {
  forgetExplanations();
  const rankings = found.map(({ hits }) => hits);
  const instructions = requests.map(({ instruction }) => instruction);
  const slowest = (stage) => Math.max(...found.map(({ timings }) => timings[stage] ?? 0));
  const moves = new Map([...places(rankings)].map(([id, place]) => [id, { ...place, ...move(place) }]));
  const best = Math.max(0, ...rankings.flat().map(({ score }) => score));
  shown = { requests, path, moves };
  const [sentence, detail] = summary(instructions, [...moves.values()]);
  $("summary").replaceChildren(sentence, ...(detail ? [" ", element("span", "hint", detail)] : []));
  $("summary").title = detail && MOVED;
  const facts = {
    Encode: ms(slowest("encode_ms")), Search: ms(slowest("search_ms")),
    Rerank: slowest("rerank_ms") ? ms(slowest("rerank_ms")) : null, "Round trip": ms(roundTrip),
    Model: found[1].model, Index: found[1].index_version, Notes: found[1].notes.join(" ") || null,
  };
  $("facts").replaceChildren(...pairs(facts).children);
  const names = instructions[0] ? ["First", "Second"] : ["Off", "On"];
  SIDES.forEach((side, i) => {
    const title = instructions[i] ?? "Without an instruction";
    $(`heading-${side}`).replaceChildren(element("span", "", title));
    $(`heading-${side}`).title = title;
    $(`show-${side}`).textContent = names[i];
    const why = { request: explaining(requests, i), ask };
    const items = rankings[i].map((hit, at) => item(hit, at + 1, moves.get(hit.id), share(hit.score, best), why));
    $(`hits-${side}`).replaceChildren(...(items.length ? items : [element("li", "none", "No passages.")]));
  });
  reveal("rankings");
  clamp();
  draw();
}

/** What the lower half of the page holds: the welcome, the rankings, or neither. */
export function reveal(part) {
  $("welcome").hidden = part !== "welcome";
  for (const id of ["facts", "switches", "rankings"]) $(id).hidden = part !== "rankings";
  if (part !== "rankings") $("summary").textContent = $("summary").title = "";
}

/** How many results the second instruction moved, in a sentence; and what became of them, if any did. */
function summary([a, b], moves) {
  if (!moves.length) return ["Nothing found.", ""];
  if (a === b) return [`Both rankings are the same: ${a ? "the instructions are" : "there is no instruction"}.`, ""];
  const count = (test) => moves.filter(test).length;
  const results = count((m) => m.b);
  const moved = count((m) => m.b && m.a !== m.b);
  const kinds = {
    stayed: results - moved, "changed rank": count((m) => m.a && m.b && m.a !== m.b),
    entered: count((m) => !m.a), left: count((m) => !m.b),
  };
  const subject = !a ? "The instruction" : b ? "The second instruction" : "Leaving the instruction out";
  return [
    `${subject} moved ${moved || "none"} of ${counted(results, "result")}.`,
    Object.entries(kinds).filter(([, n]) => n).map(([kind, n]) => `${n} ${kind}`).join(", "),
  ];
}

/** A passage's title, from the metadata; without one, its text speaks for itself. */
export const titleOf = (metadata) => Object.entries(metadata).find(([name, value]) => name.toLowerCase() === "title" && value);

function item(hit, rank, { kind, mark, words }, length, why) {
  const li = $("hit").content.cloneNode(true).firstElementChild;
  const part = (name) => li.querySelector(`.${name}`);
  const [titleField, title] = titleOf(hit.metadata) ?? [];
  li.dataset.id = hit.id;
  part("rank").textContent = rank;
  part("score").textContent = hit.score.toFixed(3);
  part("score").style.setProperty("--length", length);
  part("title").textContent = part("title").title = title ?? "";
  part("id").textContent = part("id").title = hit.id;
  part("move").textContent = mark;
  part("move").classList.add(kind);
  part("move").title = words;
  part("move").setAttribute("role", "img");
  part("move").setAttribute("aria-label", words);
  const best = (hit.chunk ?? hit).text; // of a long passage its best chunk, before the whole
  const text = best === hit.text ? best : `${best} … Whole passage: ${hit.text}`;
  const start = lead(best, LEAD);
  part("text").append(start, ...(start.length < text.length ? [element("span", "rest", text.slice(start.length))] : []));
  offer(li, { id: hit.id, rank, ...why });
  part("more").addEventListener("click", ({ currentTarget: button }) => {
    const whole = li.classList.toggle("whole");
    button.setAttribute("aria-expanded", whole);
    button.textContent = whole ? "Show less" : "Show all";
  });
  for (const [name, value] of Object.entries(hit.metadata)) {
    if (value === null || name === titleField) continue;
    part("metadata").append(element("li", "", element("span", "", `${name} `), element("bdi", "", String(value))));
  }
  return li;
}

/** Offer the rest of those passages that are cut off. */
function clamp() {
  const cut = document.querySelectorAll(".ranking li:not(.whole) > .text");
  const seen = [...cut].filter((text) => text.parentElement.offsetParent);
  const fits = seen.map((text) => { // all read before any is written
    const rest = text.querySelector(".rest");
    return text.clientHeight && text.scrollHeight <= text.clientHeight + 1 && (!rest || rest.offsetParent);
  });
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

// --------------------------------------------------------------------------------------- which ranking, how much of it

/** Change the layout of the rankings; each passage moves from where it was, and one that was not there fades in. */
function rearrange(change) {
  const visible = () => [...document.querySelectorAll(".ranking li[data-id]")].filter((li) => li.offsetParent);
  const before = new Map();
  for (const li of visible()) {
    for (const key of [li, li.dataset.id]) before.set(key, li.getBoundingClientRect());
  }
  change();
  clamp();
  draw();
  if (calm.matches) return;
  for (const li of visible()) {
    const from = before.get(li) ?? before.get(li.dataset.id);
    const to = li.getBoundingClientRect();
    const start = from ? { transform: `translate(${from.x - to.x}px, ${from.y - to.y}px)` } : { opacity: 0 };
    li.animate([start, {}], { duration: MOVE_MS, easing: "ease-in-out" });
  }
}

const fitting = () => (narrow.matches ? "b" : "both");

/** The choices that are not the screen's own, under the names that the address gives them. */
export const layout = () => ({
  ...(chosen("view") === "full" && { view: "full" }), ...(chosen("show") !== fitting() && { show: chosen("show") }),
});

/** One line for each passage, or with `view` "full" its metadata too; of `show`, a ranking or as many as fit. */
export function setLayout({ view, show: wanted }) {
  choose("view", view === "full" ? "full" : "compact");
  choose("show", SIDES.includes(wanted) ? wanted : fitting());
  arrange();
}

function arrange() {
  $("rankings").dataset.show = chosen("show");
  $("rankings").classList.toggle("compact", chosen("view") === "compact");
}

narrow.addEventListener("change", () => setLayout(stateOf()));
for (const group of ["show", "view"]) {
  $(group).addEventListener("change", () => {
    rearrange(arrange);
    const { view, show: before, ...asked } = stateOf();
    history.replaceState(null, "", `#${new URLSearchParams({ ...asked, ...layout() })}`);
  });
}
for (const [type, on] of [["pointerover", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) {
  $("rankings").addEventListener(type, ({ target }) => light(on ? target.closest("[data-id]")?.dataset.id : undefined));
}
const resized = new ResizeObserver(() => { clamp(); draw(); });
for (const side of SIDES) resized.observe($(`hits-${side}`));
