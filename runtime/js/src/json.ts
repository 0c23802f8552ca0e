/**
 * JSON of which nothing is taken for granted: as JSON.parse, but a key stands once in an object,
 * and nesting, numbers and text are those that every reader takes.
 */

import { reason } from './errors.js';

const MAX_DEPTH = 64;
export const LONE = /[\ud800-\udfff]/u; // half a surrogate pair
/** What opens, closes, or is text: with what follows a text that is a key. */
const TOKEN = /[{}[\]]|("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?/g;

/** Parse UTF-8; `invalid` is told what is wrong, and throws. */
export function parseStrictJson(bytes: Uint8Array, invalid: (problem: string) => never): unknown {
  try {
    const text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
    checkStructure(text); // before anything that may call itself for each level
    return JSON.parse(text, checked);
  } catch (error) {
    return invalid(`it is not JSON in UTF-8: ${reason(error)}`);
  }
}

function checked(key: string, value: unknown): unknown {
  if (value === Infinity || value === -Infinity) throw new Error('a number is out of range');
  if (LONE.test(key) || (typeof value === 'string' && LONE.test(value))) {
    throw new Error('a text holds half a surrogate pair');
  }
  return value;
}

export function isPath(value: unknown): value is string | URL {
  return typeof value === 'string' || value instanceof URL;
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

export function isIterable(value: unknown): value is Iterable<unknown> {
  return typeof value === 'object' && value !== null && Symbol.iterator in value;
}

/** Check, of a text that is JSON, that nothing nests too deeply and an object has a key once. */
function checkStructure(text: string): void {
  const open: Set<string>[] = [];
  for (const [sign, key, colon] of text.matchAll(TOKEN)) {
    if ('{['.includes(sign)) open.push(new Set());
    if ('}]'.includes(sign)) open.pop();
    if (open.length > MAX_DEPTH) throw new Error(`it nests deeper than ${MAX_DEPTH}`);
    if (colon === undefined) continue;
    const name = JSON.parse(key!) as string;
    if (open.at(-1)?.has(name)) {
      throw new Error(`the key ${JSON.stringify(name.slice(0, 80))} occurs twice`);
    }
    open.at(-1)?.add(name);
  }
}
