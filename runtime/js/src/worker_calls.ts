/** What a page and the worker that trains for it send each other. */
import type { TypedArray } from './tensors.js';

/** What a tensor consists of; a tensor of ONNX Runtime is one, too. */
export interface Samples {
  readonly type: string;
  readonly data: TypedArray | readonly string[];
  readonly dims: readonly number[];
}

/** The same as a caller may give it: numbers in a list, or a Float16Array. */
export type Given = Omit<Samples, 'data'> & {
  readonly data: Samples['data'] | ArrayLike<number>;
};

/** What a batch may be, by the names of the inputs. */
export type Batch = Readonly<Record<string, Given>>;

/** What a worker is asked for beside `create` and `release`: what it answers with can be sent. */
export const CALLS = [
  'trainBatch', 'fit', 'evaluate', 'predict', 'stepOn', 'runTrainStep', 'runEvalStep',
  'runOptimizerStep', 'lazyResetGrad', 'stepCount', 'skippedSteps', 'lastNotFinite',
  'accumulationSteps', 'getLearningRate', 'setLearningRate', 'registerLinearLRScheduler',
  'setSchedule', 'useProposedSchedule', 'restoreSchedule', 'schedulerStep', 'getParametersSize',
  'getContiguousParameters', 'loadParametersBuffer', 'saveCheckpoint', 'inferenceModel',
] as const;

export type Question = Readonly<{ id: number; method: string; values: unknown[] }>;
export interface Answer {
  readonly id: number;
  value?: unknown;
  error?: [code: string, what: string, where: string, hint: string];
}

/** The value with its tensors as what they consist of, which can be sent. */
export function pack(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(pack);
  if (!value || typeof value !== 'object' || ArrayBuffer.isView(value)) return value;
  if (isSamples(value)) return { type: value.type, data: own(value.data), dims: value.dims };
  if (![Object.prototype, null].includes(Object.getPrototypeOf(value))) return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, pack(each)]));
}

/** Without the rest of the memory that a view shows a part of, which would be sent as well. */
function own(data: Samples['data']): Samples['data'] {
  const isPart = ArrayBuffer.isView(data) && data.byteLength < data.buffer.byteLength;
  return isPart ? data.slice() : data;
}

function isSamples(value: object): value is Samples {
  return 'type' in value && 'data' in value && 'dims' in value;
}
