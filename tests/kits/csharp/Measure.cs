// Lives the life of an app that trains: trains, evaluates, saves, and prints one line of JSON with
// the losses, that of the evaluation, the time of every step, the processor time of all, the
// anonymous memory after every tenth of them, and whether the step model is open after them. A job
// is that of a training (see Job.cs) and
//     "steps": [{"inputs": [tensors]}, ...]   batches, taken in turn
//     "count": 100                            training steps, by default one for each batch, of
//     "whole_steps": 3                        which the first are made with TrainBatch, or all;
//                                             the others as in an app that looks at gradients
//     "threads": 1
//     "evaluation": {"inputs": [tensors]}     evaluated after the training, if given; or true for
//                                             the first batch
//     "save": "trained.ckpt"                  saved with the optimizer's state, if given
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using Odtpack;

static class Measure {
    struct Timespec {
        internal long Seconds, Nanoseconds;
    }
    [DllImport("libc")]
    static extern int clock_gettime(int clock, out Timespec time);
    static double Seconds(int clock) {
        clock_gettime(clock, out var time);
        return time.Seconds + time.Nanoseconds * 1e-9;
    }
    const int Monotonic = 1, Processor = 2;

    /// Anonymous memory of this process in bytes: the kernel counts pages, which takes its time.
    static long AnonymousBytes() {
        GC.Collect();
        var line = File.ReadLines("/proc/self/smaps_rollup").First(
            each => each.StartsWith("Anonymous:"));
        return long.Parse(line.Replace("Anonymous:", "").Replace("kB", "").Trim()) * 1024;
    }
    static string List(IEnumerable<double> values) => "[" + string.Join(
        ", ", values.Select(each => double.IsNaN(each) ? "NaN" : each.ToString("R"))) + "]";

    internal static void Run(string path) {
        var (json, folder) = (Json.Read(path), Path.GetDirectoryName(path));
        var batches = json["steps"].List()
            .ConvertAll(each => Tensors.ReadBatch(each["inputs"], folder));
        var count = (int)json["count"].Whole(batches.Count);
        var whole = json["whole_steps"].Whole(count);
        double[] losses = new double[count], times = new double[count];
        var memory = new List<double>(16);
        using (var training = new Training(json, folder, (int)json["threads"].Whole())) {
            var session = training.Session;
            for (var i = 0; i < 3; ++i) AnonymousBytes(); // is compiled before it counts
            var start = Seconds(Processor);
            for (var step = 0; step < count; ++step) {
                var batch = batches[step % batches.Count];
                var began = Seconds(Monotonic);
                if (step < whole) {
                    losses[step] = session.TrainBatch(batch);
                } else {
                    using (var results = session.TrainStep(batch))
                        losses[step] = results[0].GetScalar();
                    session.OptimizerStep();
                    if (training.IsScheduled) session.SchedulerStep();
                    session.LazyResetGrad();
                }
                times[step] = Seconds(Monotonic) - began;
                if ((step + 1) % Math.Max(count / 10, 1) == 0) memory.Add(AnonymousBytes());
            }
            var processor = Seconds(Processor) - start;
            var evaluated = new List<double>();
            var evaluation = json["evaluation"];
            if (evaluation.IsPresent) {
                var batch = evaluation.IsFlag
                    ? batches[0] : Tensors.ReadBatch(evaluation["inputs"], folder);
                using (var results = session.EvalStep(batch)) evaluated.Add(results[0].GetScalar());
            }
            if (json["save"].IsPresent)
                CheckpointState.SaveCheckpoint(
                    training.State, Tensors.InFolder(folder, json["save"].Text()), true);
            Console.WriteLine(
                $"{{\"losses\": {List(losses)}, \"evaluation\": {List(evaluated)}, "
                + $"\"step_seconds\": {List(times)}, \"processor_seconds\": {processor:R}, "
                + $"\"anonymous_bytes_by_tenth\": {List(memory)}, "
                + $"\"step_model\": {(session.HasStepModel ? "true" : "false")}, "
                + $"\"kernels\": {(session.HasKernels ? "true" : "false")}}}");
        }
    }
}
