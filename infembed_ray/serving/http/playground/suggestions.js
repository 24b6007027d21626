// What to try: a question from the passages of the served index, and instructions for what a question found.

import { phrases } from "./page.js";
import { titleOf } from "./results.js";

/** The search whose hits stand for the index. */
export const SAMPLE = { query: "What is it about?", top_k: 50 };

/** Instructions that suit most texts: about the reader, the form and what to leave out, as those of training are. */
const GENERAL = [
  "For beginners: what to do, in everyday words; no jargon.",
  "For experts: figures and evidence; no introductions.",
];

const MOST = 50; // characters of a suggestion from a passage

const nameOf = ({ metadata, text }) => titleOf(metadata)?.[1] ?? phrases(text, MOST)?.split(/[.:;!?](?:\s|$)/)[0];

/** A question that the index may answer: a title, or else a phrase of 4 to 12 words, best one with a question mark. */
export function questionFrom(hits) {
  const title = hits.map(({ metadata }) => titleOf(metadata)?.[1]).find(Boolean);
  const all = hits.flatMap(({ text }) => text.slice(0, 400).split(/(?<=[.:;!?])\s+/));
  const fitting = all.filter((phrase) => /^(\S+\s+){3,11}\S+$/.test(phrase));
  return title ?? fitting.find((phrase) => phrase.endsWith("?")) ?? fitting[0] ?? all[0];
}

/** Instructions to try on the query of a ranking; the last one leaves out a passage of it. */
export function instructionsFor(hits) {
  const name = hits.map(nameOf).find(Boolean);
  return [...GENERAL, ...(name ? [`Leave out “${name}”.`] : [])];
}
