/** What runs in the worker of `trainInWorker`. */
import * as web from 'onnxruntime-web/wasm';
import type { OnnxRuntime } from './platform.js';
import { TrainingSession } from './session.js';
import { type Answer, pack, type Question } from './worker_calls.js';

const ort = web as unknown as OnnxRuntime;
let session: TrainingSession;

async function perform({ method, values }: Question): Promise<unknown> {
  if (method === 'create') {
    const [files, { numThreads = 1, ...options }] = values as [never, { numThreads?: number }];
    ort.env.wasm.numThreads = numThreads;
    session = await TrainingSession.create(files, { ...options, ort });
    return undefined;
  }
  const member = session[method as keyof TrainingSession] as unknown;
  return typeof member === 'function' ? await member.apply(session, values) : member;
}

addEventListener('message', async ({ data }: MessageEvent<Question>) => {
  const { id } = data;
  try {
    postMessage({ id, value: pack(await perform(data)) } satisfies Answer);
  } catch (failed) {
    const { what, code, where, hint } = failed as Record<string, string | undefined>;
    const error: Answer['error'] =
      [code ?? 'run-failed', what ?? String(failed), where ?? '', hint ?? ''];
    postMessage({ id, error } satisfies Answer);
  }
});
