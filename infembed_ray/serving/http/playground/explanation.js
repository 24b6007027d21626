// Why a passage is where it is: its ranks and scores without and with the instruction, and the effect of each phrase.
//
// The answer is asked for at the first click, and holds for all passages of its ranking.

import { element, pairs } from "./page.js";

const MOST_HITS = 20; // that the API explains
const DEPTH = 100; // ranks without the instruction that it knows
const HINT = "Each number is what the phrase adds to this passage's score: the score with the whole instruction minus the " +
  "score without the phrase. The numbers need not add up.";

let asked = new Map(); // request, as JSON -> promise of its explanation

/** Forget the explanations of an earlier answer. */
export function forgetExplanations() { asked = new Map(); }

/** The request that explains a ranking, from those that gave both; undefined if neither has an instruction. */
export function explaining(requests, i) {
  const told = [requests[i], requests[1 - i]].find(({ instruction }) => instruction);
  return told && { ...told, top_k: Math.min(told.top_k, MOST_HITS), explain: true };
}

/** Let the button of a hit show and hide why it is there. `ask` sends a request. */
export function offer(li, { id, rank, request, ask }) {
  const [button, panel] = [li.querySelector(".ask-why"), li.querySelector(".why")];
  button.hidden = !request || rank > request.top_k;
  button.setAttribute("aria-label", `Why rank ${rank}`);
  button.addEventListener("click", async () => {
    panel.hidden = !li.classList.toggle("explained");
    button.setAttribute("aria-expanded", !panel.hidden);
    if (panel.hidden || panel.dataset.done) return;
    panel.replaceChildren(element("p", "hint", "Asking."));
    const key = JSON.stringify(request);
    if (!asked.has(key)) asked.set(key, ask(request));
    try {
      const { explanation } = await asked.get(key);
      panel.replaceChildren(...told(explanation, id, request));
      panel.dataset.done = true;
    } catch (error) {
      asked.delete(key);
      panel.replaceChildren(element("p", "hint", `This cannot be explained now: ${error.message}`));
    }
  });
}

const number = (score) => `${score < 0 ? "−" : ""}${Math.abs(score).toFixed(3)}`;
const signed = (effect) => (effect < 0 ? "" : "+") + number(effect);
const place = (rank, most) => (rank === null ? `not among the first ${most}` : `rank ${rank}`);

/** The explanation of a passage, as nodes. */
function told({ phrases, passages }, id, { instruction, top_k: k }) {
  const passage = passages.find((one) => one.id === id);
  if (!passage) return [element("p", "hint", "The passage has changed meanwhile. Search again.")];
  const { rank, rank_without: before, score, score_without: scoreBefore, effects } = passage;
  const strongest = Math.max(...passages.flatMap((one) => one.effects.map(Math.abs)));
  const places = pairs({
    "Without the instruction:": `${place(before, DEPTH)}, score ${number(scoreBefore)}`,
    "With it:": `${place(rank, k)}, score ${number(score)}`,
  });
  const characters = [...instruction]; // the offsets count code points
  const text = element("p", "phrases");
  text.dir = "auto";
  let end = 0;
  phrases.forEach((phrase, i) => {
    const shaded = element("mark", effects[i] < 0 ? "down" : "up", phrase.text, "\u00a0", element("small", "", signed(effects[i])));
    shaded.style.setProperty("--effect", strongest ? Math.abs(effects[i]) / strongest : 0);
    text.append(characters.slice(end, phrase.start).join(""), shaded);
    ({ end } = phrase);
  });
  return [places, text, element("p", "hint", HINT)];
}
