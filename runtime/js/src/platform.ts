/** What differs between Node and the rest: files, and which ONNX Runtime is the usual one. */
import type { Env, InferenceSession, Tensor, TensorConstructor } from 'onnxruntime-common';
import { fail } from './errors.js';

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

/** A file to read parts of; it has `bytes` if all of it lies in memory anyway, or else `sha256`. */
export interface OpenedFile extends Bytes {
  readonly bytes?: Uint8Array;
  /** Fills an array from a position on. */
  fill(target: Uint8Array, position: number): void;
  sha256?(): Uint8Array;
  close(): void;
}

export function inMemory(bytes: Uint8Array): OpenedFile {
  return {
    size: bytes.length, bytes, read: (at, length) => bytes.subarray(at, at + length),
    fill: (target, at) => target.set(bytes.subarray(at, at + target.length)),
    close: () => undefined,
  };
}

/** An opened checkpoint: its bytes, those of `<path>.data` if they are asked for, and its end. */
export interface OpenedCheckpoint {
  readonly where: string;
  readonly bytes: Bytes;
  data?(): Bytes;
  close(): void;
}

/** Where the elements of a checkpoint begin and end in its data file. */
export type Region = readonly [start: number, end: number];

/** A checkpoint that is to be written. */
export interface Saving {
  readonly nbytes: number;
  /** The parts of its file, and of its data file if the tensors lie there, from an offset on. */
  lay(externalFrom?: number): {
    file: Uint8Array[]; data: Uint8Array[]; digests: () => Promise<Uint8Array[]>;
  };
  /** What a checkpoint uses of its data file; throws if it is damaged. */
  regionOf(bytes: Bytes, where: string): Region | undefined;
  /** Bytes of tensors above which they go to `<path>.data`. */
  readonly dataFileAbove: number;
  /** Keep the file that is replaced, unless it is damaged: then the save before it stays. */
  readonly keep: boolean;
  /** The identity of a file that is known to be whole. */
  readonly known: string | undefined;
  /** Reads the file that is replaced. */
  isWhole(): Promise<boolean>;
}

/** What browsers compute digests and check signatures with. */
export function subtle(): SubtleCrypto {
  return (globalThis.crypto?.subtle as SubtleCrypto | undefined) ?? fail('no-web-crypto',
    'A package or checkpoint cannot be checked here: there is no crypto.subtle.', '',
    'serve the page by https or from localhost; in React Native install a polyfill');
}
