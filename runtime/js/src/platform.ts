/** What differs between Node and the rest: files, and which ONNX Runtime is the usual one. */
import type { Env, InferenceSession, Tensor, TensorConstructor } from 'onnxruntime-common';
import { platform } from '#platform';
import type { CheckpointData } from './checkpoint_format.js';

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

/** A checkpoint that is to be written. */
export interface Saving {
  readonly data: CheckpointData;
  /** Bytes of tensors above which they go to `<path>.data`. */
  readonly dataFileAbove: number;
  /** Keep the file that is replaced, unless it is damaged: then the save before it stays. */
  readonly keep: boolean;
  /** The identity of a file that is known to be whole. */
  readonly known: string | undefined;
  /** Reads the file that is replaced. */
  isWhole(): Promise<boolean>;
}
