// What an app may rely on in a session (docs/formats/kits.md), on a job of Job.cs; TIMES is how
// often it is tried.
//
//     kit calls close JOB.json TIMES      the session is closed while another thread trains
//     kit calls end JOB.json TIMES        a call that takes long is ended by Close
//     kit calls threads JOB.json TIMES    two threads train at once
//     kit calls closed JOB.json TIMES     every call after Close
//     kit calls nan JOB.json TIMES        a batch with a NaN among others
//     kit calls misuse JOB.json TIMES     what is refused changes nothing, and says what is wrong
//     kit calls dispose JOB.json TIMES    everything is disposed of while another thread trains
//     kit calls leaks JOB.json TIMES      many sessions, one after the other
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Threading;
using Odtpack;
using static Failure;

sealed class Calls {
    readonly Json json;
    readonly string folder;
    readonly OrtValue[] batch;
    readonly int times;
    readonly Dictionary<long, string> known = new Dictionary<long, string>();

    Calls(string path, int times) {
        json = Json.Read(path);
        folder = Path.GetDirectoryName(path);
        batch = Batch();
        this.times = times;
    }
    internal static void Run(string command, string path, int times) {
        var calls = new Calls(path, times);
        switch (command) {
            case "close": calls.Close(); break;
            case "end": calls.End(); break;
            case "threads": calls.Threads(); break;
            case "closed": calls.Closed(); break;
            case "nan": calls.Nan(); break;
            case "misuse": calls.Misuse(); break;
            case "dispose": calls.Dispose(); break;
            case "leaks": calls.Leaks(); break;
            default: throw new Failure("there is no command " + command);
        }
        Console.WriteLine("done");
    }

    OrtValue[] Batch() => Tensors.ReadBatch(json["steps"].List()[0]["inputs"], folder);
    Training Start() => new Training(json, folder, 1);
    static string Digest(Training training) => State.Digest(training.State);
    static string Code(Action action) {
        try {
            action();
            return "ok";
        } catch (OdtpackException error) {
            return error.Code;
        }
    }
    /// The digest after so many batches in one thread.
    string After(long batches) {
        if (known.TryGetValue(batches, out var digest)) return digest;
        using (var training = Start()) {
            for (long i = 0; i < batches; ++i) training.Session.TrainBatch(batch);
            return known[batches] = Digest(training);
        }
    }

    void Close() {
        long most = 0;
        for (var round = 0; round < times; ++round) {
            using (var training = Start())
            using (var made = new SemaphoreSlim(0)) {
                var session = training.Session;
                var last = "ok";
                long batches = 0;
                var thread = new Thread(() => {
                    while (last == "ok") {
                        last = Code(() => session.TrainBatch(batch));
                        batches += last == "ok" ? 1 : 0;
                        made.Release();
                    }
                });
                thread.Start();
                for (var i = 0; i < round % 3; ++i) made.Wait();
                Thread.Sleep(round % 5);
                session.Close();
                session.Close();
                thread.Join();
                Unless(last == "closed", "the thread that trains ended with " + last);
                Unless(Digest(training) == After(batches), "a step was cut off");
                Unless(session.StepCount == batches, $"{session.StepCount} steps, not {batches}");
                most = Math.Max(most, batches);
            }
        }
        Unless(most > 0, "the session was closed before it trained");
    }

    void End() {
        var (ended, couldEnd) = (0, false);
        for (var round = 0; round < times; ++round) {
            using (var training = Start()) {
                var session = training.Session;
                var evaluates = round % 2 == 1;
                var waits = session.HasStepModel && !evaluates;
                var before = Digest(training);
                string found = null;
                var thread = new Thread(() => {
                    var own = "busy";
                    while (own == "busy") // the other thread asks whether it runs
                        own = Code(() => {
                            if (evaluates) session.EvalStep(batch).Dispose();
                            else session.TrainBatch(batch);
                        });
                    Volatile.Write(ref found, own);
                });
                thread.Start();
                while (Volatile.Read(ref found) == null
                    && Code(() => session.SetOnNotFinite(OnNotFinite.Skip)) != "busy") { }
                session.Close();
                thread.Join();
                Unless(found == "ok" || (found == "closed" && !waits), "it ended with " + found);
                var made = found == "ok" && !evaluates ? 1 : 0;
                Unless(
                    Digest(training) == (made == 1 ? After(1) : before),
                    "the state is neither that before nor after");
                Unless(session.StepCount == made, "the step count");
                ended += found == "closed" ? 1 : 0;
                couldEnd |= !waits;
            }
        }
        Unless(ended > 0 || !couldEnd, "no call was ended");
    }

    void Threads() {
        using (var training = Start()) {
            var counts = new Dictionary<string, int>();
            var threads = Enumerable.Range(0, 2).Select(_ => new Thread(() => {
                for (var i = 0; i < 50 * times; ++i) {
                    var own = Code(() => training.Session.TrainBatch(batch));
                    lock (counts) counts[own] = counts.TryGetValue(own, out var n) ? n + 1 : 1;
                }
            })).ToList();
            threads.ForEach(thread => thread.Start());
            threads.ForEach(thread => thread.Join());
            Unless(
                counts.Keys.OrderBy(each => each).SequenceEqual(new[] { "busy", "ok" }),
                "the calls gave " + string.Join(", ", counts.Keys));
            Unless(Digest(training) == After(counts["ok"]), "two steps ran at once");
        }
    }

    void Nan() {
        var bad = Batch();
        var first = bad.First(each => each.ElementType == TensorElementType.Float);
        var values = first.ToArray<float>();
        values[0] = float.NaN;
        first.CopyFrom(values);
        using (var training = Start()) {
            var session = training.Session;
            for (var round = 0; round < times; ++round) {
                for (var i = 0; i < round % 3; ++i) session.TrainBatch(batch);
                var (before, steps) = (Digest(training), session.StepCount);
                session.SetOnNotFinite(OnNotFinite.Skip);
                Unless(double.IsNaN(session.TrainBatch(bad)), "the loss is not what it was");
                Unless(Digest(training) == before, "the batch changed something");
                Unless(session.StepCount == steps, "it counts as a step");
                Unless(session.SkippedSteps == 2 * round + 1, "it is not counted");
                var last = session.LastNotFinite;
                Unless(
                    last.Code == "loss-not-finite" && last.Step == steps + 1
                    && last.Parameters.Count == 0, $"{last.Code} in step {last.Step}");
                session.SetOnNotFinite(OnNotFinite.Stop);
                var stopped = Code(() => session.TrainBatch(bad));
                Unless(stopped == "loss-not-finite", "it gives " + stopped);
                Unless(Digest(training) == before, "the batch changed something");
                Unless(session.Fit(new[] { batch, batch }) == 2, "it does not go on");
                Unless(session.StepCount == steps + 2, "the steps are not counted");
            }
            session.SetOnNotFinite(OnNotFinite.Skip);
            var (unchanged, made) = (Digest(training), session.StepCount);
            session.TrainStep(bad).Dispose();
            session.LazyResetGrad();
            session.OptimizerStep();
            Unless(Digest(training) == unchanged, "a reset makes bad gradients good");
            Unless(session.StepCount == made, "a step on nothing counts");
            using (var other = new TrainingSession(session.Package, training.State)) {
                other.OptimizerStep();
                Unless(Digest(training) == unchanged, "they are good for another session");
                Unless(other.StepCount == made, "a step on nothing counts");
            }
        }
    }

    void Closed() {
        for (var round = 0; round < times; ++round) {
            using (var training = Start()) {
                var session = training.Session;
                session.TrainBatch(batch);
                var buffer = session.ToBuffer(true);
                var before = Digest(training);
                session.Dispose();
                session.Dispose();
                var calls = new Action[] {
                    () => session.StepOn(batch), () => session.TrainStep(batch),
                    () => session.EvalStep(batch), () => session.TrainBatch(batch),
                    session.OptimizerStep, session.LazyResetGrad,
                    () => session.SetLearningRate(0.1f), () => session.ToBuffer(true),
                    () => session.FromBuffer(buffer), session.SchedulerStep,
                    () => session.SetOnNotFinite(OnNotFinite.Stop),
                    () => session.CreatePredictor(new[] { "output" }),
                    () => session.ExportModelForInferencing("/dev/null", new[] { "output" })
                };
                foreach (var found in calls.Select(Code))
                    Unless(found == "closed", "a call gives " + found);
                Unless(session.StepCount == 1 && session.SkippedSteps == 0, "the numbers are gone");
                Unless(Digest(training) == before, "a call changed the state");
            }
        }
    }

    void Misuse() {
        using (var training = Start())
        using (var other = CheckpointState.LoadCheckpoint(
            training.Session.Package.Path("checkpoint"))) {
            var (session, memory, rows) = (training.Session, new float[64], 4);
            using (var value = OrtValue.CreateTensorValueFromMemory(memory, rows, 16))
                Unless(value.Shape.SequenceEqual(new long[] { 4, 16 }), "sizes as int are a shape");
            using (var part = OrtValue.CreateTensorValueFromPart(memory, 48, 16))
                Unless(part.Shape.SequenceEqual(new long[] { 16 }), "a part of an array");
            var actions = new (string, Action)[] {
                ("buffer-size",
                 () => OrtValue.CreateTensorValueFromMemory(memory, long.MaxValue, 4)),
                ("buffer-type", () => OrtValue.CreateTensorValueFromPart(
                    memory, 0, (TensorElementType)99, 4)),
                ("buffer-type", () => OrtValue.CreateTensorValueFromPart(
                    new int[64], 0, TensorElementType.Float, 64)),
                ("buffer-type", () => batch[0].ToArray<uint>()),
                ("empty-batch", () => session.Evaluate(new OrtValue[0][])),
                ("busy", () => training.State.CarryOver(other))
            };
            foreach (var each in actions)
                Unless(Code(each.Item2) == each.Item1, $"{Code(each.Item2)} and not {each.Item1}");
            var large = new short[(1 << 30) + 8]; // the system gives memory to what is touched
            var far = large.Length - 8; // Mono's own arithmetic on a constant overflows
            large[far] = 7;
            using (var part = OrtValue.CreateTensorValueFromPart(large, far, 8))
                Unless(part.ToArray<short>()[0] == 7, "a part beyond 2 GiB is another one");
            using (var predictor = session.CreatePredictor(new[] { "output" }))
                foreach (var bad in new[] { null, new OrtValue[] { null, null } })
                    foreach (var call in new Action[] {
                        () => session.TrainBatch(bad), () => predictor.Run(bad),
                        () => session.Evaluate(bad == null ? null : new[] { bad }),
                        () => session.Fit(bad == null ? null : new[] { bad }),
                        () => session.ExportModelForInferencing("/dev/null", null)
                    }) {
                        try {
                            call();
                            throw new Failure("a batch without values, or no names, were taken");
                        } catch (ArgumentException) { }
                    }
            session.TrainBatch(batch);
            training.State.AddProperty("app", 3);
            var before = Values(other);
            other.CarryOver(training.State, new string[0], false);
            Unless(
                (long)other.GetProperty("app") == 3 && Values(other).SequenceEqual(before),
                "an empty list carries parameters, or no properties");
            other.CarryOver(training.State);
            Unless(!Values(other).SequenceEqual(before), "what was trained is not carried over");
        }
    }
    /// Whoever disposes of everything has the memory back, also if nothing is ever collected.
    void Leaks() {
        long before = 0;
        for (var round = 0; round < times; ++round) {
            if (round == times / 2) before = Resident();
            using (var training = Start()) training.Session.TrainBatch(batch);
        }
        var more = Resident() - before;
        Unless(more < 100 * times / 2, $"{more} pages more are resident");
    }
    static long Resident() => long.Parse(File.ReadAllText("/proc/self/statm").Split(' ')[1]);

    static List<float> Values(CheckpointState state) => state.ParameterNames.SelectMany(name => {
        using (var value = state.GetParameter(name)) return value.ToArray<float>();
    }).ToList();

    /// Nothing is freed under a call that needs it, whoever disposes of what, and whatever the
    /// garbage collector finds.
    void Dispose() {
        for (var round = 0; round < times; ++round) {
            var (training, own) = (Start(), Batch());
            var found = "ok";
            var thread = new Thread(() => {
                try {
                    while (found == "ok")
                        found = Code(() => {
                            using (var results = training.Session.TrainStep(own))
                                results[0].GetScalar();
                        });
                } catch (ObjectDisposedException) {
                    found = "disposed";
                }
            });
            thread.Start();
            Thread.Sleep(round % 5);
            if (round % 2 == 0) training.Dispose();
            foreach (var value in own) value.Dispose();
            thread.Join();
            training.Dispose();
            Unless(found == "closed" || found == "disposed", "the thread ended with " + found);
            for (var i = 0; i < 5; ++i) Start(); // left to the garbage collector
            GC.Collect();
            GC.WaitForPendingFinalizers();
        }
    }
}
