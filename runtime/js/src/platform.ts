/** What differs between Node and the rest: files, and which ONNX Runtime is the usual one. */
import type { Env, InferenceSession, Tensor, TensorConstructor } from 'onnxruntime-common';
import { platform } from '#platform';

/** The module `onnxruntime-node`, `onnxruntime-web` or `onnxruntime-react-native`. */
export interface OnnxRuntime {
  readonly InferenceSession: {
    create(
      model: Uint8Array, options?: InferenceSession.SessionOptions,
    ): Promise<InferenceSession>;
  };
  readonly Tensor: TensorConstructor & { new (...args: never[]): Tensor };
  readonly env: Env;
}

/** A path (Node) or address (browser), bytes, a Blob or a file of the origin's private system. */
export type FileSource = string | URL | Uint8Array | ArrayBuffer | Blob | FileSystemFileHandle;

/** Random access to a file or to memory; `read` may return a view of shared memory. */
export interface Bytes {
  readonly size: number;
  read(position: number, length: number): Uint8Array;
}

/** A file to read parts of; `bytes` are there if all of it lies in memory anyway. */
export interface OpenedFile extends Bytes {
  readonly bytes?: Uint8Array;
  /** Fills an array from a position on. */
  fill(target: Uint8Array, position: number): void;
  sha256(): Uint8Array | Promise<Uint8Array>;
  close(): void;
}

export function inMemory(bytes: Uint8Array): OpenedFile {
  return {
    size: bytes.length, bytes, read: (at, length) => bytes.subarray(at, at + length),
    fill: (target, at) => target.set(bytes.subarray(at, at + target.length)),
    sha256: () => platform.sha256(bytes), close: () => undefined,
  };
}

/** An opened checkpoint: its bytes, those of `<path>.data` if they are asked for, and its end. */
export interface OpenedCheckpoint {
  readonly where: string;
  readonly bytes: Bytes;
  data?(): Bytes;
  close(): void;
}

/** Lays a checkpoint out: with an offset, for tensors in a data file from there on. */
export type CheckpointLayout = (externalFrom?: number) => CheckpointParts;
/** What stands in the checkpoint's file, in order, and what in its data file. */
export interface CheckpointParts {
  readonly file: Uint8Array[];
  readonly data: Uint8Array[];
  /** Hashes the tensors; the result ends the file. */
  digests(): Promise<Uint8Array[]>;
}

/** Where the elements of a checkpoint begin and end in its data file. */
export type Region = readonly [start: number, end: number];

/** A checkpoint that is to be written. */
export interface Saving {
  /** Bytes of its tensors; above `dataFileAbove` they go to `<path>.data`. */
  readonly nbytes: number;
  readonly dataFileAbove: number;
  readonly layout: CheckpointLayout;
  /** Keep the file that is replaced, unless it is damaged: then the save before it stays. */
  readonly keep: boolean;
  /** The identity of a file that is known to be whole. */
  readonly known: string | undefined;
  /** What another checkpoint uses of its data file; throws if it is damaged. */
  externalRegion(bytes: Bytes, where: string): Region | undefined;
  /** Reads the file that is replaced. */
  isWhole(): Promise<boolean>;
}

/** What storage reaches: a file written with fsync, and writes of 4 KiB, each with fsync. */
export interface StorageTimes {
  readonly writeSeconds: number;
  readonly syncSeconds: readonly number[];
}

export interface Platform {
  importRuntime(): Promise<OnnxRuntime>;
  /** `nbytes` zero bytes, from an address that is a multiple of 64 where that can be had. */
  allocate(nbytes: number): ArrayBuffer;
  /** The system as a device profile names it, and the bytes of its memory; null if unknown. */
  describe(): { system: string | null; memoryBytes: number | null };
  /** Writes a file that is removed again; absent where there is no fsync. */
  timeStorage?(folder: string, fileBytes: number): Promise<StorageTimes>;
  /** One spelling of a path or an address. */
  addressOf(path: string): string;
  /** Opens a file of a folder; throws `package-incomplete` or `package-path`. */
  openIn(folder: string | URL, path: string): Promise<OpenedFile>;
  /** The SHA-256 of some bytes. */
  sha256(bytes: Uint8Array): Uint8Array | Promise<Uint8Array>;
  openCheckpoint(path: string | URL): Promise<OpenedCheckpoint>;
  /** The path of the save before a checkpoint, if there is one. */
  previousOf(path: string | URL): string | undefined;
  /** Which file is at a path, if there is one: another one, or one that was changed, differs. */
  identity(path: string | URL): string | undefined;
  /** Makes a folder and those above it, where they are not there. */
  makeFolder(path: string | URL): Promise<void>;
  /** Replaces a file whole or not at all. */
  writeFile(path: string | URL, parts: readonly Uint8Array[]): Promise<void>;
  /** As `writeFile`; returns the identity of the new file. */
  writeCheckpoint(path: string | URL, saving: Saving): Promise<string>;
}
