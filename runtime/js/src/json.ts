/**
 * JSON of which nothing is taken for granted: as JSON.parse, but a key stands once in an object,
 * objects have no prototype, and nesting, numbers and text are those that every reader takes.
 */

const MAX_DEPTH = 64;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const LONE = /[\ud800-\udfff]/u; // half a surrogate pair

/** Parse UTF-8; throws an Error whose message says what is wrong. */
export function parseStrictJson(bytes: Uint8Array): unknown {
  let text: string;
  try {
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new Error('it is not UTF-8');
  }
  return new Parser(text).whole();
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

class Parser {
  #at = 0;

  constructor(readonly text: string) {}

  whole(): unknown {
    const value = this.#value(0);
    this.#space();
    if (this.#at < this.text.length) this.#fail('something stands after the value');
    return value;
  }

  #fail(problem: string): never {
    throw new Error(`it is not JSON at character ${this.#at}: ${problem}`);
  }

  #space(): void {
    for (let code; ; this.#at++) {
      code = this.text.charCodeAt(this.#at);
      if (code !== 0x20 && code !== 0x0a && code !== 0x0d && code !== 0x09) return;
    }
  }

  /** Whether the next sign is this one, which is then passed. */
  #take(sign: string): boolean {
    this.#space();
    if (this.text[this.#at] !== sign) return false;
    this.#at += 1;
    return true;
  }

  #value(depth: number): unknown {
    this.#space();
    const sign = this.text[this.#at];
    if (sign === '"') return this.#string();
    if (sign === '{' || sign === '[') {
      if (depth === MAX_DEPTH) this.#fail(`it nests deeper than ${MAX_DEPTH}`);
      this.#at += 1;
      return sign === '{' ? this.#object(depth + 1) : this.#list(depth + 1);
    }
    for (const [word, value] of [['true', true], ['false', false], ['null', null]] as const) {
      if (!this.text.startsWith(word, this.#at)) continue;
      this.#at += word.length;
      return value;
    }
    NUMBER.lastIndex = this.#at;
    const found = NUMBER.exec(this.text)?.[0] ?? this.#fail('there is no value');
    const number = Number(found);
    if (!Number.isFinite(number)) this.#fail('a number is out of range');
    this.#at += found.length;
    return number;
  }

  #object(depth: number): Record<string, unknown> {
    const found = Object.create(null) as Record<string, unknown>;
    if (this.#take('}')) return found;
    do {
      this.#space();
      if (this.text[this.#at] !== '"') this.#fail('a key must be text');
      const key = this.#string();
      if (key in found) this.#fail(`the key ${JSON.stringify(key.slice(0, 80))} occurs twice`);
      if (!this.#take(':')) this.#fail('a key must have a value');
      found[key] = this.#value(depth);
    } while (this.#take(','));
    if (!this.#take('}')) this.#fail('an object does not end');
    return found;
  }

  #list(depth: number): unknown[] {
    const found: unknown[] = [];
    if (this.#take(']')) return found;
    do found.push(this.#value(depth));
    while (this.#take(','));
    if (!this.#take(']')) this.#fail('a list does not end');
    return found;
  }

  #string(): string {
    const start = this.#at;
    let plain = true;
    for (this.#at += 1; ; this.#at++) {
      const code = this.text.charCodeAt(this.#at);
      if (code === 0x22) break;
      if (!(code >= 0x20)) this.#fail('a text does not end, or holds a control character'); // or NaN
      if (code !== 0x5c) continue;
      plain = false;
      this.#at += 1;
    }
    this.#at += 1;
    let found = this.text.slice(start + 1, this.#at - 1);
    if (!plain) {
      try {
        found = JSON.parse(this.text.slice(start, this.#at)) as string;
      } catch {
        this.#fail('a text has a wrong escape');
      }
    }
    if (LONE.test(found)) this.#fail('a text holds half a surrogate pair');
    return found;
  }
}
