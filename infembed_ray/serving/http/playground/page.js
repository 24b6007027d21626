// Short names for the document's parts.

export const SIDES = ["a", "b"];

export const $ = (id) => document.getElementById(id);
export const element = (name, className = "", textContent = "") =>
  Object.assign(document.createElement(name), { className, textContent });

/** The value of a group of radio buttons, and how to set it. */
export const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
export const choose = (name, value) => {
  document.querySelector(`input[name=${name}][value="${value}"]`).checked = true;
};
