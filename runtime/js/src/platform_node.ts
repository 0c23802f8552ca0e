/** Node: files by path, written whole or not at all. */
import * as fs from 'node:fs';
import { createHash, randomBytes } from 'node:crypto';
import { totalmem } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { OdtpackError, reason } from './errors.js';
import type { Bytes } from './flatbuffer.js';
import type { OnnxRuntime, Platform } from './platform.js';
import {
  identity, inTurn, previousPath, readAt, readInto, refusing, replaceFile, Save, write,
} from './saves_node.js';

const PAGE = 65536;
const HASHED_AT_ONCE = 2 ** 30; // OpenSSL counts bytes in 31 bits
const HASHED_FROM_FILE = 2 ** 20;
const BLOCK = new Uint8Array(2 ** 20).fill(0x78);
const SYSTEMS: Partial<Record<string, string>> = {
  android: 'android', darwin: 'macos', linux: 'linux', win32: 'windows',
};

export const platform: Platform = {
  async importRuntime() {
    // Its official builds send telemetry from 1.29 on, unless they are told not to by then.
    process.env.ORT_DISABLE_TELEMETRY ??= '1';
    return (await import('onnxruntime-node')) as unknown as OnnxRuntime;
  },

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

  readIn: async (folder, path) => inFolder(folder, path, (at) => fs.readFileSync(at)),

  openIn: (folder, path) => inFolder(folder, path, (at) => {
    const fd = fs.openSync(at, 'r');
    const { size } = fs.fstatSync(fd);
    const fill = (target: Uint8Array, position: number): void => {
      let problem = 'it became shorter';
      try {
        if (readInto(fd, target, position) === target.length) return;
      } catch (error) {
        problem = reason(error);
      }
      throw incomplete(path, problem, local(folder));
    };
    return {
      size,
      read: fill,
      sha256() {
        const hash = createHash('sha256');
        const block = new Uint8Array(HASHED_FROM_FILE);
        for (let position = 0; position < size; position += block.length) {
          const part = block.subarray(0, size - position);
          fill(part, position);
          hash.update(part);
        }
        return hash.digest();
      },
      close: () => fs.closeSync(fd),
    };
  }),

  async openCheckpoint(path) {
    const where = local(path);
    const opened: number[] = [];
    const open = (file: string): Bytes => {
      try {
        const fd = fs.openSync(file, 'r');
        opened.push(fd);
        const stat = fs.fstatSync(fd);
        if (!stat.isFile()) throw new Error('it is not a file');
        return { size: stat.size, read: (position, length) => readAt(fd, position, length) };
      } catch (error) {
        const absent = (error as NodeJS.ErrnoException).code === 'ENOENT';
        throw new OdtpackError(absent ? 'checkpoint-not-found' : 'checkpoint-unreadable',
          absent ? `There is no file ${file}.` : `${file} cannot be read: ${reason(error)}.`,
          where, 'pass the path of the checkpoint file of a package');
      }
    };
    return {
      where,
      bytes: open(where),
      data() {
        const file = `${where}.data`;
        if (fs.lstatSync(file, { throwIfNoEntry: false })?.isSymbolicLink()) {
          throw new OdtpackError('checkpoint-corrupt', `The data file ${file} is a link.`, where);
        }
        return open(file);
      },
      close: () => opened.forEach((fd) => fs.closeSync(fd)),
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
  return typeof path === 'string' ? path : fileURLToPath(path);
}

/** Does something with a file of a folder, which no link leads to. */
function inFolder<T>(folder: string | URL, path: string, use: (path: string) => T): T {
  const root = local(folder);
  let at = root;
  try {
    for (const part of path.split('/')) {
      at = join(at, part);
      if (fs.lstatSync(at).isSymbolicLink()) {
        throw new OdtpackError('package-path',
          `'${path}' does not lie inside the package: it is reached through a link.`, root,
          'do not use this package: it was tampered with, or not written by odtpack');
      }
    }
    if (!fs.statSync(at).isFile()) throw new Error('it is not a file');
    return use(at);
  } catch (error) {
    if (error instanceof OdtpackError) throw error;
    throw incomplete(path, reason(error), root);
  }
}

function incomplete(path: string, problem: string, root: string): OdtpackError {
  return new OdtpackError('package-incomplete',
    `The package lacks its file '${path}': ${problem}.`, root,
    'copy the whole folder, or build the package again');
}
