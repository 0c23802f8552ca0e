/** Browsers and React Native: files by address; there is no file system to write to. */
import { attempt, fail, TAMPERED } from './errors.js';
import { pathProblem } from './paths.js';
import { inMemory, type OnnxRuntime, type OpenedFile, subtle } from './platform.js';
import type { platform as node } from './platform_node.js';

async function download(address: URL, code: string): Promise<OpenedFile> {
  const load = async (): Promise<OpenedFile> => {
    const response = await fetch(address);
    if (!response.ok) throw new Error(`the server answers ${response.status}`);
    return inMemory(new Uint8Array(await response.arrayBuffer()));
  };
  return attempt(load, code, `${address} could not be loaded`, String(address),
    'check the address, and that the whole package is served');
}

function absolute(address: string | URL, folder = false): URL {
  const text = String(address);
  return new URL(folder && !text.endsWith('/') ? `${text}/` : text, globalThis.location?.href);
}

/**
 * The address of a package's file. Its path comes from the package: nothing in it may count as more
 * than a name, as `..`, `%2e%2e`, `?` or a space at its begin would in an address.
 */
function inside(folder: string | URL, path: string): URL {
  const root = absolute(folder, true);
  [root.search, root.hash] = ['', ''];
  if (!root.pathname.endsWith('/')) root.pathname += '/';
  const problem = pathProblem(path);
  const address = problem ? root : new URL(path.split('/').map(encodeURIComponent).join('/'), root);
  if (!problem && address.href.startsWith(root.href) && address.href !== root.href) return address;
  return fail('package-path',
    `${JSON.stringify(path)} ${problem ?? 'does not lie inside the package'}.`, String(root),
    TAMPERED);
}

function refuse(): never {
  fail('file-not-written', 'There are no file paths here to write to.', '',
    'pass a FileSystemFileHandle (navigator.storage.getDirectory()), or use toBlob()');
}

export const platform: typeof node = {
  importRuntime: async () => (await import('onnxruntime-web/wasm')) as unknown as OnnxRuntime,
  allocate: (nbytes) => new ArrayBuffer(nbytes),
  describe: () =>
    ({ system: navigator.product === 'ReactNative' ? null : 'web', memoryBytes: null }),
  timeStorage: async () => undefined,
  addressOf: (path) =>
    new URL(path.replaceAll('\\', '/'), globalThis.location?.href ?? 'file:///').href,
  openIn: async (folder, path) => download(inside(folder, path), 'package-incomplete'),
  async openCheckpoint(path) {
    const bytes = await download(absolute(path), 'checkpoint-not-found');
    return { where: String(path), bytes, close: () => undefined };
  },
  async sha256(bytes) {
    return new Uint8Array(await subtle().digest('SHA-256', bytes as Uint8Array<ArrayBuffer>));
  },
  previousOf: () => undefined,
  identity: () => undefined,
  fileAt: () => undefined,
  makeFolder: refuse,
  writeFile: refuse,
  writeCheckpoint: refuse,
};
