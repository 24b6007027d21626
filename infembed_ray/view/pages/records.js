// Rows of a synthesis output: what was asked of each row, what the judge picked, and why a row ended.

import { $, element, pairs, stateOf } from "../playground/page.js";
import { count, go, options, start, text } from "./shared.js";

const KINDS = { kept: "Kept", rejected: "Rejected", "dead letter": "Dead letter" };
const PASSAGES = {
  positive: "the positive passage", negative_instruction: "the negative instruction's passage",
  negative_query: "the negative query's passage", distractor: "a distractor", none: "none of the passages",
};
/** Scenario of the judge -> heading, and the columns of its instruction, query and right passage. */
const SCENARIOS = {
  positive: ["Positive", "instruction_positive", "query_positive", "document_positive"],
  negative_instruction: ["Negative instruction", "instruction_negative", "query_positive", "hard_negative_document_1"],
  negative_query: ["Negative query", "instruction_positive", "query_negative", "hard_negative_document_2"],
};

let words = []; // that are searched for

const field = (name, value) => element("div", "field", element("h4", "", name),
  value ? text(value, "text", words) : element("p", "hint", value === "" ? "empty" : "not reached"));

function verdict(scenario, picked) {
  if (!picked) return element("p", "verdict hint", "not judged");
  const right = picked === scenario;
  const mark = element("span", right ? "yes" : "no", right ? "✓ " : "✗ ");
  return element("p", "verdict", mark, `The judge picked ${right ? "this passage" : PASSAGES[picked] ?? picked}.`);
}

function scenario(row, name) {
  const [title, instruction, query, passage] = SCENARIOS[name];
  return element("section", "", element("h3", "", title), verdict(name, row.provenance?.verdicts?.[name]),
    field("Instruction", row[instruction]), field("Query", row[query]), field("Passage", row[passage]));
}

function complement(found) {
  if (!found) return null;
  return element("section", "wide", element("h3", "", "Complement"),
    element("p", "verdict", ...(found.fault ? [element("span", "no", "✗ "), found.fault]
      : [element("span", "yes", "✓ "), "Under it, the negative instruction's passage is the right one."])),
    field("Instruction", found.instruction_complement));
}

function chips(row) {
  const shown = ["source", "topic", "split", "language"].filter((name) => row[name]);
  return element("ul", "metadata", ...shown.map((name) =>
    element("li", "", element("span", "", `${name} `), element("bdi", "", row[name]))));
}

function provenance({ provenance: known, request_hash }) {
  if (!known && !request_hash) return null;
  const { generator, judge, prompt_version, prompt_tokens, completion_tokens, usd } = known ?? {};
  return element("details", "", element("summary", "", "Provenance"), pairs({
    Generator: generator, Judge: judge, Prompts: prompt_version, "Prompt tokens": prompt_tokens,
    "Completion tokens": completion_tokens, USD: usd?.toFixed(5), Request: request_hash,
  }));
}

function card(row) {
  const badge = element("span", `badge ${row.kind.split(" ")[0]}`, KINDS[row.kind]);
  const why = row.reason ?? row.error;
  const item = element("li", "card",
    element("div", "head", badge, element("bdi", "id", row.id)),
    text(row.query_positive || `Failed at ${row.step}`, "title", words, "h2"), chips(row),
    why ? element("p", "why", element("code", "", row.step), " ", ...text(why, "", words).childNodes) : null);
  if (row.kind !== "dead letter") {
    item.append(element("div", "scenarios", ...Object.keys(SCENARIOS).map((name) => scenario(row, name)),
      ...[complement(row.complement)].filter(Boolean)));
  }
  item.append(...[provenance(row)].filter(Boolean));
  return item;
}

/** A select for every field whose rows differ; the counts are those that the other conditions leave. */
function showFilters(filters, state) {
  for (const [name, values] of Object.entries(filters)) {
    if (name === "kind") continue;
    let select = $(`filter-${name}`);
    if (!select) {
      select = Object.assign(element("select"), { id: `filter-${name}`, name });
      const label = Object.assign(element("label", "", name), { htmlFor: select.id });
      $("filters").append(element("div", "", label, select));
    }
    const missing = state[name] && !values.some(({ value }) => value === state[name]);
    const listed = missing ? [{ value: state[name], count: 0 }, ...values] : values;
    options(select, listed.map(({ value, count: n }) => ({ value, label: `${value} (${count(n)})` })), state[name], "Any");
  }
  const kinds = Object.fromEntries(filters.kind.map(({ value, count: n }) => [value, n]));
  for (const input of document.querySelectorAll("[name=kind]")) {
    input.checked = input.value === (state.kind ?? "");
    if (input.value) input.nextElementSibling.dataset.count = count(kinds[input.value] ?? 0);
  }
}

function show(answer, state, ms) {
  words = (state.q ?? "").split(/\s+/).filter(Boolean);
  $("q").value = state.q ?? "";
  $("served").textContent = `${count(answer.total)} rows`;
  showFilters(answer.filters, state);
  $("summary").textContent = answer.matching ? `${count(answer.matching)} of ${count(answer.total)} rows, in ${Math.round(ms)} ms`
    : "No row matches. Take a condition away.";
  $("rows").replaceChildren(...answer.rows.map(card));
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  go({ ...stateOf(), q: $("q").value.trim(), page: "" }, show);
});
$("ask").addEventListener("change", ({ target }) => {
  if (target.name) go({ ...stateOf(), [target.name]: target.value, page: "" }, show);
});
start(show);
