/** What a device reaches through ONNX Runtime, for `odtpack devices import`. */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { varint } from './inference.js';
import { importRuntime } from './opening.js';
import { platform } from '#platform';
import type { OnnxRuntime } from './platform.js';
import { openSession, tensorOver, usualProvider, writesInPlace } from './runtime.js';
import { type Dims, product } from './tensors.js';

/** See docs/formats/measurements.md; an empty list could not be measured here. */
export type Measurements = Readonly<Awaited<ReturnType<typeof benchmark>>>;

export interface BenchmarkOptions {
  /** Which ONNX Runtime; by default that of the platform. */
  ort?: OnnxRuntime;
  /** Threads of a training, 1 by default; in WebAssembly `ort.env.wasm.numThreads` decides. */
  threads?: number;
  /** Where to measure storage; without it, and in browsers, that is left out. */
  folder?: string;
  fileBytes?: number;
  /** What the system grants the app in bytes, if it tells. */
  memoryLimit?: number;
  /** In a browser with WebGPU: onnxruntime-web/webgpu, which measures the GPU as well. */
  gpu?: OnnxRuntime;
}

/**
 * Measure matrix products, convolutions, copies and storage, each five times: about half a minute.
 *
 * @throws OdtpackError `file-not-written` if `folder` cannot be written to; `model-not-loadable`
 *   with `gpu` where there is no WebGPU.
 */
export async function benchmark(options: BenchmarkOptions = {}) {
  const { ort = await importRuntime(), folder, fileBytes = 2 ** 26, memoryLimit, gpu } = options;
  const settable = writesInPlace(ort) || usualProvider(ort) !== 'wasm';
  const threads = settable ? (options.threads ?? 1) : (ort.env.wasm.numThreads || 1);
  const products = (count: number): Promise<number> =>
    productFlops([256, 512, 1024], (shapes) => operatorSeconds(ort, 'MatMul', shapes, count));
  const found = {
    gemm_flops: [] as number[], gemm_single_flops: [] as number[],
    convolution_flops: [] as number[], copy_bytes_per_second: [] as number[],
    write_bytes_per_second: [] as number[], sync_seconds: [] as number[],
    gpu_gemm_flops: [] as number[], gpu_copy_bytes_per_second: [] as number[],
    gpu_operator_seconds: [] as number[],
  };
  for (let round = 0; round < 5; round++) { // in turns: a slow minute shows in each
    const flops = await products(threads);
    found.gemm_flops.push(flops);
    if (threads === 1) found.gemm_single_flops.push(flops);
    else if (settable) found.gemm_single_flops.push(await products(1));
    const images = [[4, 64, 58, 58], [64, 64, 3, 3], [4, 64, 56, 56]];
    const work = 2 * 4 * 64 * 56 * 56 * 64 * 9;
    found.convolution_flops.push(work / (await operatorSeconds(ort, 'Conv', images, threads)));
    const elements = 2 ** 24;
    const copied = await operatorSeconds(ort, 'Neg', [[elements], [elements]], 1);
    found.copy_bytes_per_second.push((4 * elements) / copied);
    const times = folder === undefined ? undefined : await platform.timeStorage(folder, fileBytes);
    if (times) {
      found.write_bytes_per_second.push(fileBytes / times.writeSeconds);
      found.sync_seconds.push(...times.syncSeconds);
    }
    if (gpu) {
      const seconds = (shapes: Dims[]) => gpuSeconds(gpu, 'MatMul', shapes, [2, 6]);
      found.gpu_gemm_flops.push(await productFlops([256, 1024, 4096], seconds, 0.5 / 64));
      const moved = await gpuSeconds(gpu, 'Neg', [[2 ** 22], [2 ** 22]], [2, 6]);
      found.gpu_copy_bytes_per_second.push(2 ** 24 / moved);
      found.gpu_operator_seconds.push(await gpuSeconds(gpu, 'Neg', [[16], [16]], [20, 120]));
    }
  }
  const { system, memoryBytes } = platform.describe();
  return {
    format: 1 as const, kit: 'js' as const, onnxruntime: ort.env.versions.common, system, threads,
    ...found, file_bytes: found.sync_seconds.length && fileBytes,
    read_bytes_per_second: [] as number[], // no call drops the pages of a file
    memory_bytes: memoryBytes, memory_limit_bytes: memoryLimit ?? null,
    gpu: gpu ? await gpuName(gpu) : null,
  };
}

async function gpuName(ort: OnnxRuntime): Promise<string | null> {
  const { description, vendor, architecture } = (await gpuOf(ort)).adapterInfo;
  const name = [description, vendor, architecture].filter(Boolean).join(', ');
  return name.replace(/[^\w .,:;+()/-]/g, ' ').slice(0, 64).trim() || null;
}

async function gpuOf(ort: OnnxRuntime): Promise<GPUDevice> {
  return await ort.env.webgpu.device as unknown as GPUDevice;
}

/** FLOP/s of the best of some sizes; after one that takes longer than `most`, none is tried. */
async function productFlops(
  sizes: readonly number[], seconds: (shapes: Dims[]) => Promise<number>, most = Infinity,
): Promise<number> {
  let best = 0;
  for (const size of sizes) {
    const square = [size, size];
    const taken = await seconds([square, square, square]);
    best = Math.max(best, (2 * size ** 3) / taken);
    if (taken > most) break;
  }
  return best;
}

/** Seconds of one operator: what the longer of two chains takes more, until the GPU is done. */
async function gpuSeconds(
  ort: OnnxRuntime, kind: string, shapes: readonly Dims[], lengths: readonly [number, number],
): Promise<number> {
  const bests = [];
  for (const length of lengths) {
    bests.push(await bestSeconds(ort, chain(kind, shapes, length), shapes, {
      executionProviders: ['webgpu'], preferredOutputLocation: 'gpu-buffer',
      graphOptimizationLevel: 'disabled',
    }, 4, 0, async (results) => {
      await (await gpuOf(ort)).queue.onSubmittedWorkDone();
      Object.values(results).forEach((each) => each.dispose());
    }));
  }
  return Math.max(bests[1]! - bests[0]!, 1e-9) / (lengths[1] - lengths[0]);
}

/** Seconds of one run of an operator on the processor. */
function operatorSeconds(
  ort: OnnxRuntime, kind: string, shapes: readonly Dims[], threads: number,
): Promise<number> {
  const options = { executionProviders: [usualProvider(ort)], intraOpNumThreads: threads };
  return bestSeconds(ort, chain(kind, shapes), shapes, options, 5, 0.3);
}

/** The best of at least so many runs in at least so many seconds. */
async function bestSeconds(
  ort: OnnxRuntime, model: Uint8Array, shapes: readonly Dims[],
  options: InferenceSession.SessionOptions, runs: number, least: number,
  ended?: (results: InferenceSession.OnnxValueMapType) => Promise<void>,
): Promise<number> {
  const session = await openSession(ort, model, 'operator', options);
  try {
    const tensor = (dims: Dims): Tensor => {
      const data = new Float32Array(platform.allocate(4 * product(dims)), 0, product(dims));
      return tensorOver(ort, 'float32', data.fill(1 / dims[0]!), dims);
    };
    const feeds = Object.fromEntries(shapes.slice(0, -1).map((dims, i) => [`t${i}`, tensor(dims)]));
    const name = `t${shapes.length - 1}`;
    const fetches = writesInPlace(ort) ? { [name]: tensor(shapes.at(-1)!) } : [name];
    let [best, total] = [Infinity, 0];
    for (let run = 0; run < runs || total < least; run++) {
      const start = performance.now();
      const results = await session.run(feeds, fetches);
      await ended?.(results);
      const seconds = (performance.now() - start) / 1000;
      best = Math.min(best, seconds);
      total += seconds;
    }
    return best;
  } finally {
    await session.release();
  }
}

/**
 * A model of one operator without attributes on float32 tensors, the last of which is its result;
 * in a longer chain it takes its result again, of the first tensor's shape, in place of that one.
 */
function chain(kind: string, shapes: readonly Dims[], length = 1): Uint8Array {
  const field = (number: number, content: Iterable<number>): number[] => {
    const bytes = [...content];
    return [number * 8 + 2, ...varint(bytes.length), ...bytes];
  };
  const text = (value: string) => new TextEncoder().encode(value);
  const last = shapes.length - 1;
  const values = shapes.flatMap((shape, i) => {
    const dims = shape.flatMap((size) => field(1, [0x08, ...varint(size)]));
    const type = field(1, [0x08, 0x01, ...field(2, dims)]);
    return field(i === last ? 12 : 11, [...field(1, text(`t${i}`)), ...field(2, type)]);
  });
  const nodes = Array.from({ length }, (_, at) => field(1, [
    ...shapes.slice(0, -1).flatMap((__, i) => field(1, text(i || !at ? `t${i}` : `v${at}`))),
    ...field(2, text(at === length - 1 ? `t${last}` : `v${at + 1}`)), ...field(4, text(kind)),
  ]));
  const graph = [...nodes.flat(), ...field(2, text('o')), ...values];
  // IR version 8, opset 17
  return Uint8Array.from([0x08, 0x08, ...field(8, [0x10, 0x11]), ...field(7, graph)]);
}
