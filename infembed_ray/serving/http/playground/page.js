// Parts of the document, and the colours.
//
// Data is shown as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** An element with a class and children, which are nodes or texts; null is left out. */
export function element(name, className = "", ...children) {
  const made = Object.assign(document.createElement(name), { className });
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** A definition list of pairs; those without a value are left out. */
export function pairs(values) {
  const known = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  return element("dl", "facts", ...known.map(([name, value]) =>
    element("div", "", element("dt", "", name), element("dd", "", String(value)))));
}

/** The value of a group of radio buttons, and how to set it. */
export const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
export const choose = (name, value) => {
  document.querySelector(`input[name=${name}][value="${value}"]`).checked = true;
};

/** The whole phrases with which a text begins, of so many characters at most. */
export const phrases = (text, most) => (text.length <= most ? text : text.slice(0, most + 1).match(/^.*[.,:;!?](?=\s)/su)?.[0]);

/** The beginning of a text: whole phrases, or whole words if its first phrase is longer. */
export const lead = (text, most) =>
  phrases(text, most) ?? text.slice(0, most + 1).match(/^.*\S(?=\s)/su)?.[0] ?? text.slice(0, most);

/** What the address asks for. */
export const stateOf = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

$("skip").addEventListener("click", (event) => { event.preventDefault(); $("results").focus(); });

function theme(value) {
  document.documentElement.dataset.theme = value;
  choose("theme", value);
}

$("theme").addEventListener("change", () => {
  theme(chosen("theme"));
  try { localStorage.setItem("theme", chosen("theme")); } catch { /* storage is off: it lasts as long as the page */ }
});
let kept = "";
try { kept = localStorage.getItem("theme") ?? ""; } catch { /* as above */ }
if (["light", "dark"].includes(kept)) theme(kept);
