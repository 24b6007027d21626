// A request as a curl command or as Python code, and the way into the clipboard.

import { element } from "./page.js";

const KEY_VARIABLE = "INFEMBED_API_KEY";
const absolute = (path) => new URL(path, document.baseURI).href;
const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;

/** Language -> code that sends a request to a path; `locked`: the server needs a key, which the code reads from a variable. */
export const SNIPPETS = {
  curl: (request, locked, path) => [
    `curl -s ${quoted(absolute(path))}`,
    ...(locked ? [`-H "Authorization: Bearer $${KEY_VARIABLE}"`] : []),
    "-H 'Content-Type: application/json'",
    `-d ${quoted(JSON.stringify(request))}`,
  ].join(" \\\n  "),
  python: (request, locked, path) => [
    ...(locked ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(absolute("v1"))}, api_key=${locked ? `os.environ["${KEY_VARIABLE}"]` : '"-"'})`,
    `found = client.post(${python(path.replace("v1", ""))}, cast_to=object, body=${python(request)})`,
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

/** Copy a text; returns whether it worked. */
export async function toClipboard(text) {
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
