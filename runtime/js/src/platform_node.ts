/** Node: files by path, written whole or not at all. */
import * as fs from 'node:fs';
import { createHash, randomBytes } from 'node:crypto';
import { totalmem } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { OdtpackError, reason } from './errors.js';
import { type Bytes, Source, type Table } from './flatbuffer.js';
import type { OnnxRuntime, Platform } from './platform.js';

const writev = promisify(fs.writev);
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
        return { size: stat.size, read: (position, length) => read(fd, position, length) };
      } catch (error) {
        const absent = (error as NodeJS.ErrnoException).code === 'ENOENT';
        throw new OdtpackError(absent ? 'checkpoint-not-found' : 'checkpoint-unreadable',
          absent ? `There is no checkpoint ${file}.` : `${file} cannot be read: ${reason(error)}.`,
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

  writeFile: (path, parts) => refusing(local(path), () => replace(local(path), parts)),

  async writeCheckpoint(path, nbytes, layout, dataFileAbove, previous) {
    const target = local(path);
    const [dataPath, before] = [`${target}.data`, previousPath(target)];
    await refusing(target, async () => {
      const occupied = firstExternalOffset(previous === 'kept' ? before : target);
      const keep = (): void => {
        if (previous !== 'replaced') return;
        shareData(dataPath, before, occupied !== undefined);
        keepAs(target, before);
      };
      if (nbytes <= dataFileAbove) {
        const { file, digests } = layout();
        await replace(target, file, digests, keep);
        if (occupied !== undefined) fs.rmSync(dataPath, { force: true });
        return;
      }
      // Two files cannot change their names at one instant: new data go where the checkpoint
      // of now has none, then the one that refers to them replaces it.
      const stat = fs.lstatSync(dataPath, { throwIfNoEntry: false });
      if (stat && !stat.isFile()) throw new Error(`${dataPath} is not a plain file`);
      const start = occupied === undefined || occupied >= nbytes ? 0 : (stat?.size ?? 0);
      const { file, data, digests } = layout(start);
      const fd = fs.openSync(dataPath, stat ? 'r+' : 'wx');
      try {
        const [, tail] = await Promise.all([write(fd, data, start), digests()]);
        fs.fsyncSync(fd);
        syncFolder(dirname(target));
        await replace(target, file, async () => tail, keep);
        if (start === 0 && previous === 'none') fs.ftruncateSync(fd, nbytes);
      } finally {
        fs.closeSync(fd);
      }
    });
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

function read(fd: number, position: number, length: number): Uint8Array {
  const bytes = new Uint8Array(length);
  return bytes.subarray(0, readInto(fd, bytes, position));
}

/** Fills an array as far as the file goes; returns how many bytes that are. */
function readInto(fd: number, bytes: Uint8Array, position: number): number {
  let done = 0;
  while (done < bytes.length) {
    const count = fs.readSync(fd, bytes, done, bytes.length - done, position + done);
    if (!count) break;
    done += count;
  }
  return done;
}

/** Writes in another thread, in which this one may hash; returns where it ended. */
async function write(
  fd: number, parts: readonly Uint8Array[], position: number,
): Promise<number> {
  let rest = parts.filter(({ length }) => length);
  while (rest.length) {
    let { bytesWritten } = await writev(fd, rest, position);
    position += bytesWritten;
    // A system writes as much as it likes: the parts that are done go, and a piece of the next.
    while (rest[0] && bytesWritten >= rest[0].length) bytesWritten -= rest.shift()!.length;
    if (rest[0]) rest[0] = rest[0].subarray(bytesWritten);
  }
  return position;
}

async function refusing<T>(target: string, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof OdtpackError) throw error;
    throw new OdtpackError('file-not-written',
      `${target} could not be written: ${reason(error)}.`, target,
      'check that the folder exists, is writable and has space left', error);
  }
}

function previousPath(target: string): string {
  return `${target}.previous`;
}

/** Give the data of a checkpoint that becomes the one before the name that it refers to. */
function shareData(dataPath: string, before: string, external: boolean): void {
  const kept = `${before}.data`;
  const [own, other] = [dataPath, kept].map((each) => fs.statSync(each, { throwIfNoEntry: false }));
  if (external ? other && other.ino === own?.ino && other.dev === own.dev : !other) return;
  fs.rmSync(before, { force: true }); // first what refers to the data
  fs.rmSync(kept, { force: true });
  if (external) fs.linkSync(dataPath, kept);
}

/** Give a file, if there is one, a second name, so that one of the two always exists. */
function keepAs(target: string, before: string): void {
  if (!fs.existsSync(target)) return;
  const link = temporaryName(target);
  try {
    fs.linkSync(target, link);
  } catch {
    fs.renameSync(target, before); // a file system without hard links, such as FAT
    return;
  }
  fs.renameSync(link, before);
  fs.rmSync(link, { force: true }); // two names of one file: the rename did nothing
}

function temporaryName(target: string): string {
  const random = randomBytes(6).toString('hex');
  return join(dirname(target), `.${basename(target)}.${process.pid}-${random}.tmp`);
}

/**
 * Temporary file in the same folder, to which `tail` is computed while the parts are written,
 * fsync, what `before` does, rename, fsync of the folder.
 */
async function replace(
  target: string, parts: readonly Uint8Array[], tail?: () => Promise<Uint8Array[]>,
  before?: () => void,
): Promise<void> {
  removeStale(target);
  const temporary = temporaryName(target);
  const fd = fs.openSync(temporary, 'wx');
  try {
    try {
      const [end, last] = await Promise.all([write(fd, parts, 0), tail?.()]);
      await write(fd, last ?? [], end);
      fs.fsyncSync(fd);
    } finally {
      fs.closeSync(fd);
    }
    before?.();
    fs.renameSync(temporary, target);
  } catch (error) {
    fs.rmSync(temporary, { force: true });
    throw error;
  }
  syncFolder(dirname(target));
}

function syncFolder(folder: string): void {
  if (process.platform === 'win32') return;
  const fd = fs.openSync(folder, 'r');
  try {
    fs.fsyncSync(fd);
  } finally {
    fs.closeSync(fd);
  }
}

/** Remove what saves of processes that no longer run left beside the target. */
function removeStale(target: string): void {
  const prefix = `.${basename(target)}.`;
  for (const name of fs.readdirSync(dirname(target))) {
    const pid = name.startsWith(prefix)
      ? /^(\d{1,9})-[0-9a-f]{12}\.tmp$/.exec(name.slice(prefix.length))?.[1]
      : undefined;
    if (pid && !isRunning(Number(pid))) fs.rmSync(join(dirname(target), name), { force: true });
  }
}

function isRunning(pid: number): boolean {
  try {
    return process.kill(pid, 0);
  } catch (error) {
    return (error as NodeJS.ErrnoException).code !== 'ESRCH';
  }
}

/** Lowest offset at which the checkpoint at `path` uses its data file, if it does. */
function firstExternalOffset(path: string): number | undefined {
  let fd: number | undefined;
  try {
    fd = fs.openSync(path, 'r');
    const size = fs.fstatSync(fd).size;
    const bytes = { size, read: (at: number, length: number) => read(fd!, at, length) };
    const root = new Source(bytes, path).root('ODTC');
    const module = root.table(1);
    if (!module?.boolean(3)) return undefined;
    const tensors: Table[] = [...module.tables(0), ...module.tables(1)];
    for (const group of root.tables(2)) {
      for (const entry of group.tables(3)) tensors.push(...entry.tables(1));
    }
    const offsets = tensors.map((tensor) => Number(tensor.int64(6, -1n))).filter((at) => at >= 0);
    return offsets.length ? Math.min(...offsets) : undefined;
  } catch {
    return undefined; // absent or unreadable: nothing to preserve
  } finally {
    if (fd !== undefined) fs.closeSync(fd);
  }
}
