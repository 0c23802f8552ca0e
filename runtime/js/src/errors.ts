/** Bad input or usage: what is wrong, where, and what to do about it. */
export class OdtpackError extends Error {
  override readonly name = 'OdtpackError';

  /**
   * @param code Stable identifier, the same as in Python, such as `label-out-of-range`.
   * @param what One sentence that says what is wrong and names the culprit.
   * @param where File, URL or key in which the culprit stands.
   * @param hint The next thing to do.
   */
  constructor(
    readonly code: string,
    readonly what: string,
    readonly where = '',
    readonly hint = '',
    cause?: unknown,
  ) {
    super(what + (where && `\n  in: ${where}`) + (hint && `\n  help: ${hint}`), { cause });
  }
}

/** What helps against a package that cannot be what odtpack wrote. */
export const TAMPERED = 'do not use this package: it was tampered with, or not written by odtpack';

/** Throw an error, also where an expression stands. */
export function fail(...error: ConstructorParameters<typeof OdtpackError>): never {
  throw new OdtpackError(...error);
}

/** Throw an error unless something holds; its sentences are made either way. */
export function demand(
  holds: unknown, ...error: ConstructorParameters<typeof OdtpackError>
): asserts holds {
  if (!holds) fail(...error);
}

/** Throw `bad-argument` with a sentence unless an argument is of the kind that a call takes. */
export function requireArgument(isRight: boolean, what: string, hint = ''): asserts isRight {
  if (!isRight) fail('bad-argument', what, '', hint);
}

/** Do something; whatever it throws is this error, with the reason after what failed. */
export async function attempt<T>(
  work: () => T | Promise<T>, code: string, what: string, where = '', hint = '',
): Promise<T> {
  try {
    return await work();
  } catch (error) {
    return fail(code, `${what}: ${reason(error)}`.replace(/\.?$/, '.'), where, hint, error);
  }
}

/** The first line of whatever was thrown. */
export function reason(error: unknown): string {
  return String(error instanceof Error ? error.message : error).split('\n', 1)[0] ?? '';
}
