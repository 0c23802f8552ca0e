/** A session in a worker of its own: the page stays free while it trains. */
import type { Tensor } from 'onnxruntime-common';
import type { SaveOptions } from './checkpoint.js';
import { OdtpackError, reason } from './errors.js';
import { isPath } from './json.js';
import type { TrainingFiles, PackageFiles } from './opening.js';
import type { PackageSource } from './package.js';
import type { FileSource } from './platform.js';
import type { Feeds } from './runtime.js';
import type { Evaluation, SessionOptions, TrainingSession } from './session.js';
import {
  type Answer, type Batch, CALLS, pack, type Question, type Samples,
} from './worker_calls.js';

export type { Batch, Samples };

/** Options of ONNX Runtime, and the number of threads: more than one in an isolated page only. */
export type WorkerOptions = Omit<SessionOptions, 'ort'> & { numThreads?: number };

/** What can be sent: addresses, files and bytes, and no package or state that is open already. */
export type WorkerFiles =
  | (Omit<PackageFiles, 'package' | 'checkpointState'> &
      { package: PackageSource; checkpointState?: FileSource })
  | (Omit<TrainingFiles, 'checkpointState'> & { checkpointState: FileSource });

/** A value as it is sent: tensors as what they consist of. */
type Sent<T> = T extends Tensor ? Samples : T extends Feeds ? Record<string, Samples> : T;
type Call<M> = [M] extends [(...given: infer G) => infer R]
  ? (...given: G) => Promise<Sent<Awaited<R>>> : () => Promise<M>;

/** The calls of a `TrainingSession`, each of which is answered later. */
export type WorkerSession = {
  readonly [N in Exclude<(typeof CALLS)[number], 'fit' | 'evaluate' | 'saveCheckpoint'>]:
    Call<TrainingSession[N]>;
} & {
  fit(batches: readonly Batch[]): Promise<number>;
  evaluate(batches: readonly Batch[]): Promise<Evaluation>;
  saveCheckpoint(
    file: FileSystemFileHandle, includeOptimizerState?: boolean, options?: SaveOptions,
  ): Promise<void>;
  /** Ends the worker as well. */
  release(): Promise<void>;
};

/** Start a worker that opens a session on a package; a bundler finds the worker's script itself. */
export async function trainInWorker(
  files: WorkerFiles, options: WorkerOptions = {},
): Promise<WorkerSession> {
  const worker = new Worker(new URL('./worker_script.js', import.meta.url), { type: 'module' });
  const waiting = new Map<number, (answer: Answer) => void>();
  let count = 0;
  let released: Promise<void> | undefined;
  const closed: NonNullable<Answer['error']> = ['closed', 'The session is closed.', '', ''];
  const call = (method: string, ...values: unknown[]): Promise<unknown> =>
    new Promise((resolve, reject) => {
      if (released) throw new OdtpackError(...closed);
      const id = count++;
      waiting.set(id, ({ value, error }) => {
        waiting.delete(id);
        if (error) reject(new OdtpackError(...error));
        else resolve(value);
      });
      try {
        worker.postMessage({ id, method, values: values.map(pack) } satisfies Question);
      } catch (error) {
        const what = `What '${method}' was given cannot be sent to the worker: ${reason(error)}`;
        waiting.get(id)!({ id, error: ['bad-argument', what, '',
          'pass addresses, file handles, bytes, lists and plain objects'] });
      }
    });
  worker.onmessage = ({ data }: MessageEvent<Answer>) => waiting.get(data.id)?.(data);
  const refuse = (error: NonNullable<Answer['error']>): void => {
    for (const [id, answer] of waiting) answer({ id, error });
  };
  worker.onerror = ({ message }) => refuse(['run-failed', message ? `The worker failed: ${message}`
    : 'The script of the worker, or what it imports, could not be loaded.', import.meta.url,
    'serve worker_script.js beside this one, and let the page\'s worker-src allow it']);
  const free = async (): Promise<void> => {
    try {
      await call('release');
    } finally {
      worker.terminate();
      refuse(closed); // what it has not answered
    }
  };
  const release = (): Promise<void> => (released ??= free());
  try {
    // Addresses are the page's, and not the script's.
    const own = Object.entries(files ?? {}).map(([name, each]: [string, unknown]) => {
      const isAddress = name !== 'format' && isPath(each);
      return [name, isAddress ? String(new URL(each, location.href)) : each] as const;
    });
    await call('create', Object.fromEntries(own), options);
  } catch (error) {
    worker.terminate();
    throw error;
  }
  const calls = CALLS.map((name) =>
    [name, (...values: unknown[]) => call(name, ...values)] as const);
  return { ...Object.fromEntries(calls), release } as unknown as WorkerSession;
}
