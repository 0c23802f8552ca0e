/** Node: files by path, written whole or not at all. */
import * as fs from 'node:fs';
import { createHash, randomBytes } from 'node:crypto';
import { totalmem } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { fail, OdtpackError, reason, requireArgument } from './errors.js';
import type { OnnxRuntime, OpenedFile, Platform } from './platform.js';
import {
  identity, inTurn, openFile, previousPath, refusing, replaceFile, Save, write,
} from './saves_node.js';

const PAGE = 65536;
const HASHED_AT_ONCE = 2 ** 30; // OpenSSL counts bytes in 31 bits
const BLOCK = new Uint8Array(2 ** 20).fill(0x78);
const SYSTEMS: Partial<Record<string, string>> = {
  android: 'android', darwin: 'macos', linux: 'linux', win32: 'windows',
};

// Official builds of ONNX Runtime send telemetry from 1.29 on, unless this is set when the process
// makes its first session. ONNX Runtime does not see the environment of a `worker_threads` worker.
process.env.ORT_DISABLE_TELEMETRY ??= '1';

export const platform: Platform = {
  importRuntime: async () => (await import('onnxruntime-node')) as unknown as OnnxRuntime,

  allocate(nbytes) {
    // A WebAssembly memory begins at a page; a plain ArrayBuffer 16 bytes after one.
    const pages = Math.ceil(nbytes / PAGE);
    try {
      if (pages <= PAGE) return new WebAssembly.Memory({ initial: pages }).buffer;
    } catch {
      // No address space left for its guard pages.
    }
    return new ArrayBuffer(nbytes);
  },

  describe: () => ({ system: SYSTEMS[process.platform] ?? null, memoryBytes: totalmem() }),

  timeStorage(folder, fileBytes) {
    const path = join(folder, `.odtpack-benchmark-${randomBytes(6).toString('hex')}`);
    return refusing(path, async () => {
      const fd = fs.openSync(path, 'wx');
      try {
        const timed = async (nbytes: number): Promise<number> => {
          const parts = Array(Math.ceil(nbytes / BLOCK.length)).fill(BLOCK.subarray(0, nbytes));
          const start = performance.now();
          await write(fd, parts, 0);
          fs.fsyncSync(fd);
          return (performance.now() - start) / 1000;
        };
        const writeSeconds = await timed(fileBytes);
        const syncSeconds: number[] = [];
        while (syncSeconds.length < 8) syncSeconds.push(await timed(4096));
        return { writeSeconds, syncSeconds };
      } finally {
        fs.closeSync(fd);
        fs.rmSync(path, { force: true });
      }
    });
  },

  addressOf: (path) => pathToFileURL(path).href,

  async openIn(folder, path) {
    const root = local(folder || '.');
    const incomplete = <T>(use: () => T): T => {
      try {
        return use();
      } catch (error) {
        if (error instanceof OdtpackError) throw error;
        return fail('package-incomplete',
          `The package lacks its file '${path}': ${reason(error)}.`, root,
          'copy the whole folder, or build the package again');
      }
    };
    const file = incomplete(() => openFile(withoutLinks(root, path)));
    return {
      ...file,
      fill: (target, position) => incomplete(() => file.fill(target, position)),
      sha256: () => incomplete(() => file.sha256()),
    };
  },

  async openCheckpoint(path) {
    const where = local(path);
    const opened: OpenedFile[] = [];
    const open = (file: string): OpenedFile => {
      try {
        opened.push(openFile(file));
        return opened.at(-1)!;
      } catch (error) {
        const absent = (error as NodeJS.ErrnoException).code === 'ENOENT';
        return fail(absent ? 'checkpoint-not-found' : 'checkpoint-unreadable',
          absent ? `There is no file ${file}.` : `${file} cannot be read: ${reason(error)}.`,
          where, 'pass the path of the checkpoint file of a package');
      }
    };
    return {
      where,
      bytes: open(where),
      data() {
        const file = `${where}.data`;
        const link = fs.lstatSync(file, { throwIfNoEntry: false })?.isSymbolicLink();
        return link ? fail('checkpoint-corrupt', `The data file ${file} is a link.`, where) : open(file);
      },
      close: () => opened.forEach((file) => file.close()),
    };
  },

  sha256(bytes) {
    const hash = createHash('sha256');
    for (let at = 0; at < bytes.length; at += HASHED_AT_ONCE) {
      hash.update(bytes.subarray(at, at + HASHED_AT_ONCE));
    }
    return hash.digest();
  },

  previousOf(path) {
    const before = previousPath(local(path));
    return fs.statSync(before, { throwIfNoEntry: false })?.isFile() ? before : undefined;
  },

  identity: (path) => identity(local(path)),

  makeFolder: (path) =>
    refusing(local(path), async () => void fs.mkdirSync(local(path), { recursive: true })),

  writeFile: (path, parts) => refusing(local(path), () => replaceFile(local(path), parts)),

  writeCheckpoint(path, saving) {
    const target = local(path);
    return refusing(target, () => inTurn(target, () => new Save(target, saving).run()));
  },
};

function local(path: string | URL): string {
  requireArgument(path instanceof URL ? path.protocol === 'file:' : typeof path === 'string' && path !== '',
    'A file or folder is named by a path, or by an address that begins with file:.');
  return typeof path === 'string' ? path : fileURLToPath(path);
}

/** The path of a file of a folder, to which no link leads. */
function withoutLinks(root: string, path: string): string {
  let at = root;
  for (const part of path.split('/')) {
    at = join(at, part);
    if (!fs.lstatSync(at).isSymbolicLink()) continue;
    fail('package-path',
      `'${path}' does not lie inside the package: it is reached through a link.`, root,
      'do not use this package: it was tampered with, or not written by odtpack');
  }
  return at;
}
