/** A session in a worker of its own: the page stays free while it trains. */
import { OdtpackError } from './errors.js';
import type { TrainingFiles, PackageFiles } from './opening.js';
import type { FileSource } from './platform.js';
import type { Evaluation, SessionOptions } from './session.js';
import type { Settings } from './manifest.js';
import type { ScheduleKind } from './schedules.js';
import { type Answer, type Batch, type Call, pack, type Samples } from './worker_calls.js';

export type { Batch, Samples };

/** Options of ONNX Runtime, and the number of threads: more than one in an isolated page only. */
export type WorkerOptions = Omit<SessionOptions, 'ort'> & { numThreads?: number };

/** The calls of a `TrainingSession` that need no callback. */
export interface WorkerSession {
  trainBatch(batch: Batch): Promise<number>;
  evaluate(batches: readonly Batch[]): Promise<Evaluation>;
  predict(inputs: Batch): Promise<Record<string, Samples>>;
  stepCount(): Promise<number>;
  skippedSteps(): Promise<number>;
  setLearningRate(rate: number): Promise<void>;
  registerLinearLRScheduler(warmup: number, total: number, initialRate: number): Promise<void>;
  setSchedule(kind: ScheduleKind, initialRate: number, settings?: Settings): Promise<void>;
  restoreSchedule(): Promise<boolean>;
  saveCheckpoint(file: FileSystemFileHandle, includeOptimizerState?: boolean): Promise<void>;
  inferenceModel(outputNames?: readonly string[]): Promise<Uint8Array>;
  /** Ends the worker as well. */
  release(): Promise<void>;
}

/** Start a worker that opens a session on a package; a bundler finds the worker's script itself. */
export async function trainInWorker(
  files: PackageFiles | TrainingFiles, options: WorkerOptions = {},
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
      worker.postMessage({ id, method, values: values.map(pack) } satisfies Call);
    });
  worker.onmessage = ({ data }: MessageEvent<Answer>) => waiting.get(data.id)?.(data);
  const refuse = (error: NonNullable<Answer['error']>): void => {
    for (const [id, answer] of waiting) answer({ id, error });
  };
  worker.onerror = ({ message }) =>
    refuse(['run-failed', `The worker failed: ${message}`, '', '']);
  const free = async (): Promise<void> => {
    try {
      await call('release');
    } finally {
      worker.terminate();
      refuse(closed); // what it has not answered
    }
  };
  const release = (): Promise<void> => (released ??= free());
  // Addresses are the page's, and not the script's.
  const absolute = (source: unknown): unknown =>
    typeof source === 'string' || source instanceof URL ? String(new URL(source, location.href)) : source;
  const entries = Object.entries(files as unknown as Record<string, FileSource>);
  try {
    await call('create', Object.fromEntries(entries.map(([name, each]) =>
      [name, name === 'format' ? each : absolute(each)])), options);
  } catch (error) {
    worker.terminate();
    throw error;
  }
  return new Proxy({ release } as WorkerSession, {
    get: (own, method: string) => {
      if (method === 'release') return own.release;
      return method === 'then' ? undefined : (...values: unknown[]) => call(method, ...values);
    },
  });
}
