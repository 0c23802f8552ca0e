import { TrainingPackage, TrainingSession } from 'odtpack';
import { trainInWorker, type WorkerSession } from 'odtpack/worker';
export function apart(folder: string): Promise<WorkerSession> {
  return trainInWorker({ package: folder }, { numThreads: 2 });
}
export async function train(folder: string): Promise<number> {
  const session = await TrainingSession.create({ package: await TrainingPackage.open(folder) });
  return session.stepCount;
}
export async function ask(opened: TrainingPackage, worker: WorkerSession): Promise<unknown> {
  // @ts-expect-error: what is open cannot be sent
  await trainInWorker({ package: opened });
  await worker.trainBatch({ input: { type: 'float32', data: [1, 2], dims: [2] } });
  return [(await worker.lastNotFinite())?.parameters, await worker.getLearningRate()];
}
