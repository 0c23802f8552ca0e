// A training as it was written for ONNX Runtime 1.19, then what came since.
//
//     kit former PACKAGE IMAGES LABELS FOLDER SHAPE...
using System;
using System.IO;
using System.Linq;
using Odtpack;
using static Failure;

static class Former {
    internal static void Run(
        string package, string images, string labels, string folder, long[] shape) {
        using (var options = new SessionOptions {
            IntraOpNumThreads = 1,
            GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        })
        using (var state = CheckpointState.LoadCheckpoint(package + "/checkpoint"))
        using (var session = new TrainingSession(
            options, state, package + "/training_model.onnx", package + "/eval_model.onnx",
            package + "/optimizer_model.onnx")) {
            session.SetLearningRate(0.01f);
            var pixels = new float[shape.Aggregate(1L, (a, b) => a * b)];
            Buffer.BlockCopy(File.ReadAllBytes(images), 0, pixels, 0, 4 * pixels.Length);
            var classes = new long[shape[0]];
            Buffer.BlockCopy(File.ReadAllBytes(labels), 0, classes, 0, 8 * classes.Length);
            var inputs = new[] {
                OrtValue.CreateTensorValueFromMemory(pixels, shape),
                OrtValue.CreateTensorValueFromMemory(classes, shape[0])
            };
            for (var step = 0; step < 12; ++step) {
                using (var outputs = session.TrainStep(inputs))
                    Console.WriteLine(((double)outputs[0].ToArray<float>()[0]).ToString("R"));
                session.OptimizerStep();
                session.LazyResetGrad();
            }
            Unless(session.InputNames(true).Count == 2, "the inputs");
            Unless(session.OutputNames(false)[0] == "loss", "the outputs");
            session.EvalStep(inputs).Dispose();
            var (loss, accuracy) = session.Evaluate(new[] { inputs });
            Unless(loss > 0 && accuracy >= 0 && accuracy <= 1, "the evaluation");
            session.FromBuffer(session.ToBuffer(true), true);
            state.AddProperty("epoch", 3L);
            state.AddProperty("share", 0.25f);
            state.AddProperty("note", "one training");
            Unless((long)state.GetProperty("epoch") == 3, "the property");
            CheckpointState.SaveCheckpoint(state, folder + "/former.ckpt", true);
        }
        using (var fresh = CheckpointState.LoadCheckpoint(package + "/checkpoint"))
        using (var trained = CheckpointState.LoadCheckpoint(folder + "/former.ckpt")) {
            fresh.CarryOver(trained);
            CheckpointState.SaveCheckpoint(fresh, folder + "/carried.ckpt", true);
        }
    }
}
