// The queries on which two models differ most: both ranks of every passage, and how it moved from A to B.

import { $, element, pairs, stateOf } from "../playground/page.js";
import { count, go, options, start, text } from "./shared.js";

const CHOICES = ["a", "b", "task", "figure"];
const number = (value) => (value === null ? "–" : value.toFixed(3).replace("-", "−"));
const several = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

/** What becomes of a passage from A to B: a class, a mark, and words for it. */
function move({ a, b }, depth) {
  if (!(a && b) && (a || b || Infinity) > depth) { // listed by one model only, because it is relevant
    return { kind: "", mark: "", words: `not known: below rank ${depth} in both` };
  }
  if (!a) return { kind: "up", mark: "▲", words: `up, from below rank ${depth}` };
  if (!b) return { kind: "down", mark: "▼", words: `down, below rank ${depth}` };
  if (a === b) return { kind: "same", mark: "=", words: "same rank" };
  const by = Math.abs(a - b);
  const words = `${by} ${by === 1 ? "rank" : "ranks"} ${b < a ? "up" : "down"}`;
  return b < a ? { kind: "up", mark: `▲ ${by}`, words } : { kind: "down", mark: `▼ ${by}`, words };
}

function passageRow(passage, depth) {
  const { kind, mark, words } = move(passage, depth);
  const shown = element("span", "", mark);
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", words);
  shown.title = words;
  const label = passage.relevance > 0
    ? element("span", "badge kept", passage.relevance > 1 ? `Relevant, grade ${passage.relevance}` : "Relevant")
    : passage.changed ? element("span", "badge rejected", "Relevant under the other instruction") : null;
  const rank = (value) => element("td", value ? "rank" : "beyond", value ? String(value) : `>${depth}`);
  return element("tr", passage.relevance > 0 ? "relevant" : "", rank(passage.a), rank(passage.b),
    element("td", `move ${kind}`, shown),
    element("td", "", element("div", "head", label, element("bdi", "id", passage.id)),
      passage.text ? text(passage.text) : null));
}

function table(query, chosen, depth) {
  const head = (label, className, name) => Object.assign(element("th", className, label), { scope: "col", title: name });
  const sides = ["a", "b"].map((side) => head(side.toUpperCase(), side, chosen[side]));
  return element("table", "", element("caption", "", `Ranks under A and B of the passages for ${query.query}`),
    element("thead", "", element("tr", "", ...sides, head("Move", "", ""), head("Passage", "", ""))),
    element("tbody", "", ...query.passages.map((passage) => passageRow(passage, depth))));
}

function asked(query, answer) {
  const part = element("section", "asked", text(query.text, "title", [], "h2"));
  if (query.instruction) part.append(text(query.instruction, "instruction"));
  part.append(element("p", "hint id", query.query));
  if (query.passages.length) part.append(table(query, answer.chosen, answer.depth));
  return part;
}

function card(row, answer) {
  const change = row.b - row.a;
  const better = change > 0 ? "b" : change < 0 ? "a" : "same";
  const head = element("p", "scores",
    element("b", { a: "down", b: "up", same: "" }[better], signed(change)),
    element("span", "a", `A ${number(row.a)}`), element("span", "b", `B ${number(row.b)}`),
    element("span", "hint", { a: "A is better", b: "B is better", same: "no difference" }[better]));
  const queries = row.queries.map((query) => asked(query, answer));
  return element("li", "card", head, ...(queries.length ? queries : [element("h2", "title", row.key)]));
}

function show(answer, state) {
  const { chosen, choices, counts, means } = answer;
  for (const name of CHOICES) options($(name), choices[name].map((value) => ({ value, label: value })), chosen[name]);
  for (const input of document.querySelectorAll("[name=order]")) input.checked = input.value === (state.order ?? "");
  $("served").textContent = `${several(choices.task.length, "task")} · ${several(choices.a.length, "model")}`;
  $("summary").textContent = choices.a.length < 2 ? "One model: there is nothing to compare it with."
    : `${chosen.figure}: B is better in ${count(counts.b)} of ${count(counts.queries)} queries, A in ${count(counts.a)}.`;
  const equal = counts.queries - counts.a - counts.b;
  $("overview").replaceChildren(
    pairs({ [`A ${chosen.a}`]: number(means.a), [`B ${chosen.b}`]: number(means.b), Equal: count(equal) }),
    answer.rankings ? "" : element("p", "notice", "This output has no rankings: it is of a sweep or of an older version. ",
      "Evaluate again with another output to see the passages."));
  $("rows").replaceChildren(...answer.rows.map((row) => card(row, answer)));
}

$("ask").addEventListener("submit", (event) => event.preventDefault());
$("ask").addEventListener("change", ({ target }) => {
  const name = target.name || target.id;
  const state = { ...stateOf(), [name]: target.value, page: "" };
  if (name === "task") delete state.figure; // another task has other metrics
  go(state, show);
});
start(show);
