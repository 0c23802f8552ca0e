export { OdtpackError } from './errors.js';
export { CheckpointState, type Properties } from './checkpoint.js';
export type { Parameter } from './checkpoint_format.js';
export type { OptimizerState, PropertyKind } from './checkpoint_format.js';
export type { FileSource, OnnxRuntime } from './platform.js';
export type { Manifest, Settings } from './manifest.js';
export {
  TrainingPackage, type OpenOptions, type PackageSource, type PublicKey,
} from './package.js';
export type { PackageFiles, TrainingFiles } from './opening.js';
export type { LossReading } from './gpu.js';
export { type Evaluation, type SessionOptions, TrainingSession } from './session.js';
export { makeSchedule, type Schedule, type ScheduleKind } from './schedules.js';
export {
  loadAdapter, onnxAdapter, peftAdapter, type PeftFiles, saveAdapter,
} from './adapter.js';
export { type GenerateOptions, Generator } from './generator.js';
export { carryOver } from './carry_over.js';
export { selfCheck } from './check.js';
export { benchmark, type BenchmarkOptions, type Measurements } from './benchmark.js';
