/** Paths of a package's files: each names one file inside of it, on every system. */
import { demand, TAMPERED } from './errors.js';

const MAX_PART = 255;
const MAX_PATH = 1024;
const OUTSIDE = /[\\:\0]/;
const FORBIDDEN = /[\p{Cc}\p{Cf}\p{Cs}<>"|?*]/u;
// Names that Windows gives to devices, whatever stands after the first dot.
const DEVICE = /^(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³]) *(?:\.|$)/i;

const size = (text: string): number => new TextEncoder().encode(text).length;

/** Throw `package-path` unless the paths name files of a package, each once. */
export function checkPaths(paths: readonly string[]): void {
  const taken = new Set(['manifest.json', 'manifest.sig']);
  for (const path of paths) {
    const folded = fold(path);
    const problem = pathProblem(path) ??
      (taken.has(folded) ? 'on some systems is the same file as another' : undefined);
    demand(problem === undefined, 'package-path',
      `The manifest names the file ${JSON.stringify(path.slice(0, 300))}, which ${problem}.`,
      'manifest.json', TAMPERED);
    taken.add(folded);
  }
}

/** What is wrong with the path of a package's file, if anything is. */
export function pathProblem(path: string): string | undefined {
  const parts = path.split('/');
  if (OUTSIDE.test(path) || parts.some((part) => ['', '.', '..'].includes(part))) {
    return 'does not lie inside the package';
  }
  if (FORBIDDEN.test(path)) return 'holds characters that not every system allows in a name';
  if (size(path) > MAX_PATH || parts.some((part) => size(part) > MAX_PART)) {
    return 'is longer than every system allows';
  }
  if (parts.some((part) => /^ |[ .]$/.test(part) || DEVICE.test(part))) {
    return 'is a name that Windows reserves or changes';
  }
  return undefined;
}

/** A path as a system that ignores case and the form of accents compares it. */
function fold(path: string): string {
  return path.normalize('NFC').toUpperCase().toLowerCase().normalize('NFC');
}
