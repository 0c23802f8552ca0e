// Measure what this browser's processor and GPU reach, and offer the measurements as a file.
import { benchmark } from 'odtpack';

const $ = (id) => document.getElementById(id);
let file;

async function runtime(build) {
  const ort = await import(`./modules/ort/ort.${build}.min.mjs`);
  ort.env.wasm.wasmPaths = new URL('./modules/ort/', location.href).href;
  ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(2, navigator.hardwareConcurrency) : 1;
  return ort;
}

async function measure() {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  const where = adapter ? '' : ' There is no WebGPU in this browser: the processor is all.';
  $('status').textContent = `Measuring …${where}`;
  const found = await benchmark({
    ort: await runtime('wasm'), gpu: adapter ? await runtime('webgpu') : undefined,
  });
  show('gemm', found.gemm_flops, 1e9, 'GFLOPS');
  show('copy', found.copy_bytes_per_second, 1e9, 'GB/s');
  show('gpu-gemm', found.gpu_gemm_flops, 1e9, 'GFLOPS');
  show('gpu-copy', found.gpu_copy_bytes_per_second, 1e9, 'GB/s');
  show('gpu-operator', found.gpu_operator_seconds, 1e-6, 'µs');
  file = new Blob([JSON.stringify(found, null, 2)], { type: 'application/json' });
  const threads = `${found.threads} thread${found.threads === 1 ? '' : 's'}`;
  $('status').textContent =
    `ONNX Runtime ${found.onnxruntime}, ${threads}${found.gpu ? `; ${found.gpu}` : ''}.${where}`;
  $('download').disabled = false;
}

/** The median. */
function show(id, values, unit, name) {
  const middle = values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];
  $(id).textContent = middle ? `${(middle / unit).toPrecision(3)} ${name}` : '–';
}

$('measure').addEventListener('click', () => {
  $('measure').disabled = true;
  delete document.body.dataset.ended;
  measure().catch(({ what, message }) => {
    $('status').textContent = `It cannot be measured: ${what ?? message}`;
  }).finally(() => {
    $('measure').disabled = false;
    document.body.dataset.ended = 'true';
  });
});

$('download').addEventListener('click', () => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(file);
  link.download = 'measurements.json';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
