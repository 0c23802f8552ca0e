// Steps of odtpack and of TensorFlow.js on the same network, batch and parameters, in turns.

/** Compare; what comes of it is in `found` once it is there. */
function begin(task) {
  const failed = (error) => ({ failed: String(error.stack ?? error) });
  compare(task).catch(failed).then((found) => Object.assign(window, { found }));
}

async function compare({ shape, steps, rounds }) {
  const bytes = async (name) => (await fetch(`/files/${name}.bin`)).arrayBuffer();
  const images = new Float32Array(await bytes('input'));
  const labels = new BigInt64Array(await bytes('labels'));
  const options = { ort, executionProviders: ['webgpu'], loss: 'every' };
  const session = await kit.TrainingSession.create({ package: '/files/package' }, options);
  session.setLearningRate(0.001);
  const ours = () => session.trainBatch({
    input: new ort.Tensor('float32', images, shape),
    labels: new ort.Tensor('int64', labels, [shape[0]]),
  });
  await tf.setBackend('webgpu');
  await tf.ready();
  const theirs = tensorflow(session.state.parameters, images, labels, shape);
  const losses = [[], []];
  const times = [[], []];
  for (let step = 0; step < steps; step++) {
    losses[0].push(await ours());
    losses[1].push(await theirs());
  }
  for (let round = 0; round < rounds; round++) {
    for (const [i, make] of [ours, theirs].entries()) {
      const start = performance.now();
      await make();
      times[i].push(performance.now() - start);
    }
  }
  await session.release();
  return { losses, times, backend: tf.getBackend() };
}

/** A step of the network in TensorFlow.js, which has channels last. */
function tensorflow(parameters, images, labels, shape) {
  const variable = (tensor) => tf.variable(tf.keep(tensor));
  const given = (name) => tf.tensor(parameters.get(name).data, parameters.get(name).dims);
  const names = [...parameters.keys()];
  const layers = (kind) => [...new Set(names.map((name) => name.split('.')[0]))].sort()
    .filter((name) => name.startsWith(kind));
  const made = (name, change) => tf.tidy(() => ({
    weight: variable(change(given(`${name}.weight`))), bias: variable(given(`${name}.bias`)),
  }));
  const convolutions = layers('conv').map((name) => made(name, (w) => w.transpose([2, 3, 1, 0])));
  const dense = layers('fc').map((name, i) => made(name, (w) => {
    if (i || !convolutions.length) return w.transpose();
    const channels = convolutions.at(-1).bias.shape[0];
    const side = Math.sqrt(w.shape[1] / channels);
    return w.reshape([w.shape[0], channels, side, side]).transpose([2, 3, 1, 0])
      .reshape([w.shape[1], w.shape[0]]);
  }));
  const forward = (x) => {
    for (const { weight, bias } of convolutions) {
      x = tf.relu(tf.add(tf.conv2d(x, weight, 1, 'same'), bias));
      x = tf.maxPool(x, 2, 2, 'valid');
    }
    x = x.reshape([x.shape[0], -1]);
    for (const [i, { weight, bias }] of dense.entries()) {
      x = tf.add(tf.matMul(x, weight), bias);
      if (i + 1 < dense.length) x = tf.relu(x);
    }
    return x;
  };
  const optimizer = tf.train.adam(0.001, 0.9, 0.999, 1e-8);
  const classes = dense.at(-1).bias.shape[0];
  const numbers = Int32Array.from(labels, Number);
  const [size, channels, height, width] = shape;
  return async () => {
    const loss = tf.tidy(() => optimizer.minimize(() => {
      // One channel is the same first and last.
      const x = convolutions.length ? tf.tensor(images, [size, height, width, channels])
        : tf.tensor(images, shape);
      return tf.losses.softmaxCrossEntropy(tf.oneHot(tf.tensor1d(numbers, 'int32'), classes), forward(x));
    }, true));
    const [value] = await loss.data();
    loss.dispose();
    return value;
  };
}
