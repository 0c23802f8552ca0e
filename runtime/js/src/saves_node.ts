/** Files that are written whole or not at all, and the save before a checkpoint. */
import * as fs from 'node:fs';
import { createHash, randomBytes } from 'node:crypto';
import { basename, dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { demand, fail, OdtpackError, reason } from './errors.js';
import type { OpenedFile, Region, Saving } from './platform.js';

/** How systems refuse a hard link: FAT and exFAT have none, and Android forbids them. */
const NO_LINKS = new Set('EPERM EACCES ENOTSUP EOPNOTSUPP ENOSYS EINVAL EMLINK'.split(' '));
const HASHED_AT_ONCE = 2 ** 20;
const ABSENT = new Set(['ENOENT', 'EISDIR']);
const NO_FOLDER_SYNC = new Set(['EINVAL', 'ENOTSUP']);

/** Which file a path stands for: device, number on it, size, and time of the last change. */
export function identity(path: string): string | undefined {
  const stat = quietly(() => fs.statSync(path, { bigint: true, throwIfNoEntry: false }));
  return stat && identityOf(stat);
}

function identityOf({ dev, ino, size, mtimeNs }: fs.BigIntStats): string {
  return [dev, ino, size, mtimeNs].join(':');
}

export function previousPath(target: string): string {
  return `${target}.previous`;
}

/** Says what the system refused. */
export async function refusing<T>(target: string, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof OdtpackError) throw error;
    return fail('file-not-written', `${target} could not be written: ${reason(error)}.`, target,
      'check that the folder exists, is writable and has space left', error);
  }
}

/** Writes in another thread, in which this one may hash; returns where it ended. */
export async function write(
  fd: number, parts: readonly Uint8Array[], position: number,
): Promise<number> {
  let rest = parts.filter(({ length }) => length);
  while (rest.length) {
    let { bytesWritten } = await promisify(fs.writev)(fd, rest, position);
    position += bytesWritten;
    // A system writes as much as it likes: the parts that are done go, and a piece of the next.
    while (rest[0] && bytesWritten >= rest[0].length) bytesWritten -= rest.shift()!.length;
    if (rest[0]) rest[0] = rest[0].subarray(bytesWritten);
  }
  return position;
}

const turns = new Map<string, Promise<unknown>>();

/** One save to a name after the other: each looks at what the one before left. */
export async function inTurn<T>(target: string, work: () => Promise<T>): Promise<T> {
  const name = join(fs.realpathSync(dirname(target)), basename(target));
  const before = turns.get(name) ?? Promise.resolve();
  const mine = before.then(work, work);
  turns.set(name, mine);
  try {
    return await mine;
  } finally {
    if (turns.get(name) === mine) turns.delete(name);
  }
}

/** One save: the file, its data file, and the names of the save before. */
export class Save {
  readonly #data: string;
  readonly #before: string;
  readonly #beforeData: string;
  #current: Region | undefined; // of the file that is replaced
  #kept: Region | undefined; // of the save before, if that stays and lies in the same file
  #rotates = false; // the file that is replaced becomes the save before
  #written: string | undefined;

  constructor(readonly target: string, readonly saving: Saving) {
    this.#data = `${target}.data`;
    this.#before = previousPath(target);
    this.#beforeData = `${this.#before}.data`;
  }

  /** Returns the identity of the new file. */
  async run(): Promise<string> {
    requirePlain(this.target);
    return this.saving.nbytes > this.saving.dataFileAbove ? this.#outside() : this.#inside();
  }

  /** Write one file that holds everything. */
  async #inside(): Promise<string> {
    await this.#look();
    const { file, digests } = this.saving.lay();
    const written = await this.#replace(file, digests);
    if (this.#current || this.#kept) remove(this.#data);
    return written;
  }

  /** Write the elements into the data file, and then the file that refers to them. */
  async #outside(): Promise<string> {
    const stat = fs.lstatSync(this.#data, { throwIfNoEntry: false });
    if (stat && !stat.isFile()) throw new Error(`${this.#data} is not a plain file`);
    const fd = fs.openSync(this.#data, stat ? 'r+' : 'wx+');
    try {
      if (!stat) takeMode(fd, this.target, 0o600); // each save opens it again
      await this.#look();
      this.#requireLinks();
      return await this.#intoData(fd);
    } catch (error) {
      if (!this.#inPlace()) { // the region of the old file is as it was
        if (stat) fs.ftruncateSync(fd, stat.size);
        else remove(this.#data);
      }
      throw error;
    } finally {
      quietly(() => fs.closeSync(fd));
    }
  }

  async #intoData(fd: number): Promise<string> {
    const start = freeRegion([this.#current, this.#kept], this.saving.nbytes);
    const { file, data, digests } = this.saving.lay(start);
    const [, tail] = await Promise.all([write(fd, data, start), digests()]);
    fs.fsyncSync(fd);
    syncFolder(dirname(this.target));
    const written = await this.#replace(file, async () => tail);
    const before = this.#rotates ? this.#current : this.#kept;
    quietly(() => fs.ftruncateSync(fd, Math.max(start + this.saving.nbytes, before?.[1] ?? 0)));
    return written;
  }

  /** Find out what is there, and what of it must stay whole until the new file is. */
  async #look(): Promise<void> {
    this.#current = this.#regionOf(this.target);
    this.#rotates = this.saving.keep && (await this.#isWhole());
    const shared = isSameFile(this.#beforeData, this.#data);
    this.#kept = shared && !this.#rotates ? this.#regionOf(this.#before) : undefined;
  }

  /** What the checkpoint at `path` uses of its data file: nothing if it is absent or damaged. */
  #regionOf(path: string): Region | undefined {
    let file: OpenedFile | undefined;
    try {
      file = openFile(path);
      return this.saving.regionOf(file, path);
    } catch (error) {
      if (error instanceof OdtpackError || isOneOf(ABSENT, error)) return undefined;
      throw error; // it may be whole
    } finally {
      file?.close();
    }
  }

  /** Whether the file that is replaced may become the save before. */
  async #isWhole(): Promise<boolean> {
    const found = identity(this.target);
    if (found === undefined) return false;
    const size = fs.statSync(this.#data, { throwIfNoEntry: false })?.size ?? 0;
    if (this.#current && size < this.#current[1]) return false;
    return found === this.saving.known || this.saving.isWhole();
  }

  /** Refuse, before anything is written, to keep data that can have no second name. */
  #requireLinks(): void {
    if (!this.#rotates || !this.#current || isSameFile(this.#beforeData, this.#data)) return;
    const refused = withLink(this.#data, this.target, () => undefined);
    demand(!refused, 'file-not-written',
      `${this.target} could not be written: the save before it cannot be kept, because its ` +
        `data are a file of their own and this file system has no hard links: ${refused?.message}.`,
      this.#data, 'save without keeping the one before, or to a file system that has them',
      refused);
  }

  async #replace(file: readonly Uint8Array[], tail: () => Promise<Uint8Array[]>): Promise<string> {
    const had = fs.existsSync(this.#beforeData);
    try {
      await replaceFile(this.target, file, tail, (written) => {
        this.#written = written;
        if (!this.#rotates) return undefined;
        // The data go on under the name that the file refers to which becomes the save before.
        if (this.#current && !isSameFile(this.#beforeData, this.#data)) {
          const refused =
            withLink(this.#data, this.target, (link) => fs.renameSync(link, this.#beforeData));
          if (refused) throw refused;
        }
        return this.#before;
      });
    } catch (error) {
      const moved = this.#inPlace() || isSameFile(this.#before, this.target);
      if (!had && !moved) remove(this.#beforeData);
      throw error;
    }
    if (this.#rotates && !this.#current) remove(this.#beforeData);
    return this.#written!;
  }

  #inPlace(): boolean {
    return this.#written !== undefined && identity(this.target) === this.#written;
  }
}

/**
 * Temporary file in the same folder, to which `tail` is computed while the parts are written,
 * fsync, rename, fsync of the folder.
 *
 * @param before Is given the identity of the new file, and says under which name the old is kept.
 */
export async function replaceFile(
  target: string, parts: readonly Uint8Array[], tail?: () => Promise<Uint8Array[]>,
  before: (written: string) => string | undefined = () => undefined,
): Promise<void> {
  requirePlain(target);
  removeStale(target);
  const temporary = temporaryName(target);
  const fd = fs.openSync(temporary, 'wx');
  try {
    let written: string;
    try {
      takeMode(fd, target);
      const [end, last] = await Promise.all([write(fd, parts, 0), tail?.()]);
      await write(fd, last ?? [], end);
      fs.fsyncSync(fd);
      written = identityOf(fs.fstatSync(fd, { bigint: true }));
    } finally {
      quietly(() => fs.closeSync(fd));
    }
    const previous = before(written);
    const moved = previous !== undefined && keepAs(target, previous);
    try {
      fs.renameSync(temporary, target);
    } catch (error) {
      if (moved && !fs.existsSync(target)) fs.renameSync(previous, target);
      throw error;
    }
  } catch (error) {
    remove(temporary);
    throw error;
  }
  try {
    syncFolder(dirname(target));
  } catch (error) {
    fail('file-not-written',
      `${target} was written, but it may not survive a power cut: ${reason(error)}.`, target,
      'save again', error);
  }
}

/** Nobody wants a folder, a device or a pipe replaced, nor a link, or what it leads to. */
function requirePlain(target: string): void {
  const stat = fs.statSync(target, { throwIfNoEntry: false });
  demand(!stat?.isDirectory(), 'path-is-a-folder', `${target} is a folder and not a file.`, target,
    'name a file in it');
  demand(!stat || stat.isFile(), 'file-not-written',
    `${target} could not be written: it is not an ordinary file, which could be replaced.`, target,
    'name another file');
  const isLink = fs.lstatSync(target, { throwIfNoEntry: false })?.isSymbolicLink();
  demand(!isLink, 'file-not-written',
    `${target} is a link, and nothing is saved through a link or in its place.`, target,
    'remove the link, or name the file that it leads to');
}

/** Give a new file the permissions of the one that it replaces or belongs to, if any. */
function takeMode(fd: number, of: string, least = 0): void {
  const stat = fs.statSync(of, { throwIfNoEntry: false });
  if (stat) quietly(() => fs.fchmodSync(fd, (stat.mode & 0o666) | least));
}

/**
 * Give a file a second name, so that one of the two always exists.
 *
 * @returns Whether it lost its own name, because the file system has no hard links.
 */
function keepAs(target: string, before: string): boolean {
  const refused = withLink(target, target, (link) => fs.renameSync(link, before));
  if (refused) fs.renameSync(target, before);
  return refused !== undefined;
}

/** Use a second name of a file; returns why there is none if the file system has no hard links. */
function withLink(path: string, target: string, use: (link: string) => void): Error | undefined {
  const link = temporaryName(target);
  try {
    fs.linkSync(path, link);
  } catch (error) {
    if (isOneOf(NO_LINKS, error)) return error as Error;
    throw error;
  }
  try {
    use(link);
  } finally {
    fs.rmSync(link, { force: true }); // two names of one file: a rename did nothing
  }
  return undefined;
}

function isOneOf(codes: ReadonlySet<string>, error: unknown): boolean {
  return codes.has((error as NodeJS.ErrnoException).code ?? '');
}

function temporaryName(target: string): string {
  const random = randomBytes(6).toString('hex');
  return join(dirname(target), `.${basename(target)}.${process.pid}-${random}.tmp`);
}

/** Make renames in a folder durable, where the system can; throws if it could, and did not. */
function syncFolder(folder: string): void {
  if (process.platform === 'win32') return;
  const fd = fs.openSync(folder, 'r');
  try {
    fs.fsyncSync(fd);
  } catch (error) {
    if (!isOneOf(NO_FOLDER_SYNC, error)) throw error;
  } finally {
    quietly(() => fs.closeSync(fd));
  }
}

/** Do what nothing depends on: what was synced is on the disk, and what is left does no harm. */
export function quietly<T>(work: () => T): T | undefined {
  try {
    return work();
  } catch {
    return undefined;
  }
}

function remove(path: string): void {
  quietly(() => fs.rmSync(path, { force: true }));
}

/** Remove what saves of processes that no longer run left beside the target. */
function removeStale(target: string): void {
  const prefix = `.${basename(target)}.`;
  for (const name of fs.readdirSync(dirname(target))) {
    const [, pid] = /^(\d{1,9})-[0-9a-f]{12}\.tmp$/.exec(name.slice(prefix.length)) ?? [];
    if (!name.startsWith(prefix) || !pid || isRunning(Number(pid))) continue;
    remove(join(dirname(target), name));
  }
}

function isRunning(pid: number): boolean {
  try {
    return process.kill(pid, 0);
  } catch (error) {
    return (error as NodeJS.ErrnoException).code !== 'ESRCH';
  }
}

function isSameFile(one: string, other: string): boolean {
  const [a, b] = [one, other].map((path) =>
    fs.statSync(path, { bigint: true, throwIfNoEntry: false }));
  return a !== undefined && a.ino === b?.ino && a.dev === b.dev;
}

/** The first place for some bytes that touches none of the regions in use. */
function freeRegion(taken: readonly (Region | undefined)[], nbytes: number): number {
  let start = 0;
  for (const [first, end] of taken.filter((each) => each !== undefined).sort(([a], [b]) => a - b)) {
    if (start + nbytes <= first) break;
    start = Math.max(start, end);
  }
  return start;
}

/** A file to read parts of. */
export function openFile(path: string): OpenedFile {
  if (!fs.statSync(path).isFile()) {
    throw Object.assign(new Error('it is not a file'), { code: 'EISDIR' });
  }
  const fd = fs.openSync(path, 'r');
  const close = (): void => void quietly(() => fs.closeSync(fd));
  const { size } = fs.fstatSync(fd);
  const read = (position: number, length: number): Uint8Array => {
    const bytes = new Uint8Array(length);
    return bytes.subarray(0, readInto(fd, bytes, position));
  };
  const fill = (target: Uint8Array, position: number): void => {
    if (readInto(fd, target, position) < target.length) throw new Error('it became shorter');
  };
  const sha256 = (): Uint8Array => {
    const hash = createHash('sha256');
    const block = new Uint8Array(HASHED_AT_ONCE);
    for (let position = 0; position < size; position += block.length) {
      const part = block.subarray(0, size - position);
      fill(part, position);
      hash.update(part);
    }
    return hash.digest();
  };
  return { size, read, fill, sha256, close };
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
