// Browse the rows of the report: kept and removed records, rejected rows and dead letters, with filters and a text search.
"use strict";
const ALL = JSON.parse(document.getElementById("data").textContent);
const PAGE = 20;
const FILTERS = ["kind", "step", "reason", "source", "topic"];
const $ = (id) => document.getElementById(id);

/** Make an element; text is never read as HTML. */
function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

/** Return the rows that pass all filters and hold all words, in any of their texts, ids or reasons; case does not matter. */
function matching(rows, chosen, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) => FILTERS.every((name) => !chosen[name] || row[name] === chosen[name]) && (!wanted.length ||
    wanted.every((word) => [row.id, row.reason, row.detail, ...Object.values(row.texts)].some((text) => text?.toLowerCase().includes(word)))));
}

/** Count the values of a field, the most frequent first. */
function counted(rows, name) {
  const counts = new Map();
  for (const row of rows) if (row[name]) counts.set(row[name], (counts.get(row[name]) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function card(row) {
  const style = { kept: "s0", rejected: "lost", "dead letter": "failed", removed: "other" }[row.kind];
  const head = element("h3", "", element("i", `key ${style}`), `${row.kind} `, element("span", "muted", row.id));
  const facts = [row.source, row.topic, row.step && `at ${row.step}`, row.reason, row.detail].filter(Boolean).join(" · ");
  const texts = element("dl");
  for (const [name, text] of Object.entries(row.texts)) {
    const value = element("dd", "", text);
    value.dir = "auto";
    texts.append(element("dt", "", name), value);
  }
  const made = element("article", "row", head, element("p", "muted small", facts), texts);
  const picks = Object.entries(row.picks).map(([scenario, pick]) => `${scenario}: ${pick} ${scenario === pick ? "✓" : "✗"}`);
  if (picks.length) made.append(element("p", "small", `The judge picked: ${picks.join("; ")}`));
  return made;
}

let page = 0;

function show() {
  const chosen = Object.fromEntries(FILTERS.map((name) => [name, $(`by-${name}`).value]));
  const rows = matching(ALL, chosen, $("words").value);
  for (const name of FILTERS) { // a filter offers what the other conditions leave
    const select = $(`by-${name}`);
    const values = counted(matching(ALL, { ...chosen, [name]: "" }, $("words").value), name);
    if (chosen[name] && !values.some(([value]) => value === chosen[name])) values.push([chosen[name], 0]);
    select.replaceChildren(new Option("any", ""), ...values.map(([value, n]) => new Option(`${value} (${n})`, value, false, value === chosen[name])));
    select.parentElement.hidden = values.length === 0;
  }
  page = Math.max(0, Math.min(page, Math.ceil(rows.length / PAGE) - 1));
  const shown = rows.slice(page * PAGE, (page + 1) * PAGE);
  $("found").textContent = rows.length ? `${page * PAGE + 1} to ${page * PAGE + shown.length} of ${rows.length} rows` : "No row matches.";
  $("previous").disabled = page === 0;
  $("next").disabled = (page + 1) * PAGE >= rows.length;
  $("rows").replaceChildren(...shown.map(card));
}

for (const name of FILTERS) $(`by-${name}`).addEventListener("change", () => { page = 0; show(); });
$("words").addEventListener("input", () => { page = 0; show(); });
$("previous").addEventListener("click", () => { page -= 1; show(); });
$("next").addEventListener("click", () => { page += 1; show(); });
show();
