/** Write a request of this page as curl, as Python, and with the OpenAI SDK: the same request, ready to run. */
import { address, type Body, type Json, key } from "./api";

/** A request to be written down. `file` is the name of the one whose bytes are the body. */
export interface Call {
  method: string;
  route: string;
  body?: Body;
  file?: { name: string; type: string; accept: string };
}

export const LANGUAGES = ["curl", "Python", "OpenAI SDK"] as const;
export type Language = (typeof LANGUAGES)[number];

const VARIABLE = "BATON_API_KEY";

export function written(call: Call, language: Language): string {
  const plain = { ...call, ...(call.body ? { body: whole(call.body) } : {}) };
  if (language === "curl") return asCurl(plain);
  return language === "Python" ? asPython(plain) : asSdk(plain);
}

/** Leave out that the page streams: a program that is pasted prints one whole answer. */
function whole(body: Body): Body {
  const { stream: _stream, stream_options: _options, ...rest } = body;
  return rest;
}

function shell(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function asCurl(call: Call): string {
  const words = [
    `curl ${call.method === "GET" || call.method === "POST" ? "" : `-X ${call.method} `}${shell(address(call.route))}`,
  ];
  if (key.value) words.push(`-H "Authorization: Bearer $${VARIABLE}"`);
  if (call.file) {
    words.push(
      `-H ${shell(`Content-Type: ${call.file.type}`)}`,
      `-H ${shell(`Accept: ${call.file.accept}`)}`,
    );
    words.push(`--data-binary ${shell(`@${call.file.name}`)}`);
  } else if (call.body) {
    // No line of JSON is the word JSON, so nothing within the text can end it; and it may be longer than an argument.
    words.push("-H 'Content-Type: application/json'", "--data-binary @- <<'JSON'");
    return `${words.join(" \\\n  ")}\n${JSON.stringify(call.body, null, 2)}\nJSON\n`;
  } else if (call.method === "POST") words.push("-X POST");
  return `${words.join(" \\\n  ")}\n`;
}

/** A JSON value as a Python literal. JSON's strings are Python's. */
function literal(value: Json, indent: string): string {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const rows = Array.isArray(value)
    ? value.map((each) => literal(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (rows.length === 0) return `${open}${close}`;
  const line = `${open}${rows.join(", ")}${close}`;
  if (line.length < 70 && !line.includes("\n")) return line;
  return `${open}\n${rows.map((row) => `${inner}${row},\n`).join("")}${indent}${close}`;
}

const CHAT = "/v1/chat/completions";
const secret = () => (key.value ? `os.environ["${VARIABLE}"]` : '"none"');

function asPython(call: Call): string {
  const lines = key.value ? ["import os", ""] : [];
  if (call.file) lines.push("from pathlib import Path", "");
  lines.push(
    "import httpx",
    "",
    `answer = httpx.${call.method.toLowerCase()}(`,
    `    ${JSON.stringify(address(call.route))},`,
  );
  const headers: Record<string, string> = {};
  if (call.file) Object.assign(headers, { "Content-Type": call.file.type, Accept: call.file.accept });
  const named = Object.entries(headers).map(
    ([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`,
  );
  if (key.value) named.unshift(`"Authorization": "Bearer " + ${secret()}`);
  if (named.length) lines.push(`    headers={${named.join(", ")}},`);
  if (call.file) lines.push(`    content=Path(${JSON.stringify(call.file.name)}).read_bytes(),`);
  else if (call.body) lines.push(`    json=${literal(call.body, "    ")},`);
  lines.push("    timeout=600,", ")", "answer.raise_for_status()");
  if (call.method === "DELETE") return lines.join("\n").concat("\n");
  lines.push(
    call.route === CHAT ? 'print(answer.json()["choices"][0]["message"]["content"])' : printed(call),
  );
  return lines.join("\n").concat("\n");
}

function printed(call: Call): string {
  return call.file ? 'print(answer.json()["data"]["classes"])' : "print(answer.json())";
}

/** What `chat.completions.create` takes by name; the rest goes into `extra_body`. */
const NAMED = new Set(["model", "messages", "max_tokens", "temperature", "tools"]);

function asSdk(call: Call): string {
  const lines = key.value ? ["import os", ""] : [];
  if (call.file) lines.push("from pathlib import Path", "");
  lines.push("from openai import OpenAI", "");
  lines.push(`client = OpenAI(base_url=${JSON.stringify(address("/v1"))}, api_key=${secret()})`);
  if (call.route === CHAT && call.body) {
    const named = Object.entries(call.body).filter(([name]) => NAMED.has(name));
    const extra = Object.fromEntries(Object.entries(call.body).filter(([name]) => !NAMED.has(name)));
    lines.push("answer = client.chat.completions.create(");
    for (const [name, value] of named) lines.push(`    ${name}=${literal(value, "    ")},`);
    if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},`);
    lines.push(")", "print(answer.choices[0].message.content)");
    return lines.join("\n").concat("\n");
  }
  lines.push(
    `answer = client.${call.method.toLowerCase()}(`,
    `    ${JSON.stringify(address(call.route))},`,
    "    cast_to=object,",
  );
  if (call.file) {
    lines.push(`    content=Path(${JSON.stringify(call.file.name)}).read_bytes(),`);
    lines.push(
      `    options={"headers": ${literal({ "Content-Type": call.file.type, Accept: call.file.accept }, "    ")}},`,
    );
  } else if (call.body) lines.push(`    body=${literal(call.body, "    ")},`);
  lines.push(")");
  if (call.method !== "DELETE") lines.push(call.file ? 'print(answer["data"]["classes"])' : "print(answer)");
  return lines.join("\n").concat("\n");
}
