/** Node: files by path, written whole or not at all. */
import * as fs from 'node:fs';
import { createHash, randomBytes } from 'node:crypto';
import { totalmem } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { fail, OdtpackError, reason, requireArgument, TAMPERED } from './errors.js';
import type { OnnxRuntime, OpenedCheckpoint, OpenedFile, Saving } from './platform.js';
import {
  identity, inTurn, openFile, previousPath, quietly, refusing, replaceFile, Save, write,
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

/** What there is once for each platform: the other one implements the same. */
export const platform = {
  importRuntime: async () => (await import('onnxruntime-node')) as unknown as OnnxRuntime,

  /** `nbytes` zero bytes, from an address that is a multiple of 64 where that can be had. */
  allocate(nbytes: number): ArrayBuffer {
    // A WebAssembly memory begins at a page; a plain ArrayBuffer 16 bytes after one.
    const pages = Math.ceil(nbytes / PAGE);
    try {
      if (pages <= PAGE) return new WebAssembly.Memory({ initial: pages }).buffer;
    } catch {
      // No address space left for its guard pages.
    }
    return new ArrayBuffer(nbytes);
  },

  /** The system as a device profile names it, and the bytes of its memory; null if unknown. */
  describe: (): { system: string | null; memoryBytes: number | null } =>
    ({ system: SYSTEMS[process.platform] ?? null, memoryBytes: totalmem() }),

  /**
   * Seconds of a file that is written with fsync, and of writes of 4 KiB, each with fsync; the file
   * is removed again. Undefined where there is no fsync.
   */
  timeStorage(
    folder: string, fileBytes: number,
  ): Promise<{ writeSeconds: number; syncSeconds: number[] } | undefined> {
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

  /** One spelling of a path or an address. */
  addressOf: (path: string): string => pathToFileURL(path).href,

  /** Opens a file of a folder; throws `package-incomplete` or `package-path`. */
  async openIn(folder: string | URL, path: string): Promise<OpenedFile> {
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
      sha256: () => incomplete(() => file.sha256!()),
    };
  },

  async openCheckpoint(path: string | URL): Promise<OpenedCheckpoint> {
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
        if (link) fail('checkpoint-corrupt', `The data file ${file} is a link.`, where);
        return open(file);
      },
      close: () => opened.forEach((file) => file.close()),
    };
  },

  sha256(bytes: Uint8Array): Uint8Array | Promise<Uint8Array> {
    const hash = createHash('sha256');
    for (let at = 0; at < bytes.length; at += HASHED_AT_ONCE) {
      hash.update(bytes.subarray(at, at + HASHED_AT_ONCE));
    }
    return hash.digest();
  },

  /** The path of the save before a checkpoint, if there is one. */
  previousOf(path: string | URL): string | undefined {
    const before = previousPath(local(path));
    return fs.statSync(before, { throwIfNoEntry: false })?.isFile() ? before : undefined;
  },

  /** Which file is at a path, if there is one: another one, or one that was changed, differs. */
  identity: (path: string | URL): string | undefined => identity(local(path)),

  /** The first MiB of a file, none if it cannot be read; undefined where there is no plain file. */
  fileAt(path: string | URL): Uint8Array | undefined {
    const file = local(path);
    if (!quietly(() => fs.statSync(file))?.isFile()) return undefined;
    return quietly(() => {
      const opened = openFile(file);
      try {
        return opened.read(0, Math.min(opened.size, 2 ** 20));
      } finally {
        opened.close();
      }
    }) ?? new Uint8Array();
  },

  /** Makes a folder and those above it, where they are not there. */
  makeFolder: (path: string | URL): Promise<void> =>
    refusing(local(path), async () => void fs.mkdirSync(local(path), { recursive: true })),

  /** Replaces a file whole or not at all. */
  writeFile: (path: string | URL, parts: readonly Uint8Array[]): Promise<void> =>
    refusing(local(path), () => replaceFile(local(path), parts)),

  /** As `writeFile`; returns the identity of the new file. */
  writeCheckpoint(path: string | URL, saving: Saving): Promise<string> {
    const target = local(path);
    return refusing(target, () => inTurn(target, () => new Save(target, saving).run()));
  },
};

function local(path: string | URL): string {
  const isFile = path instanceof URL && path.protocol === 'file:';
  requireArgument(isFile || (typeof path === 'string' && path !== ''),
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
      `'${path}' does not lie inside the package: it is reached through a link.`, root, TAMPERED);
  }
  return at;
}
