using System;
using System.Collections;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;

namespace Odtpack {
    public interface IDisposableReadOnlyCollection<out T> : IReadOnlyList<T>, IDisposable { }

    /// <summary>What a call returns: disposing of it disposes of all its values.</summary>
    internal sealed class Values : IDisposableReadOnlyCollection<OrtValue> {
        readonly OrtValue[] values;

        internal unsafe Values(IntPtr* handles, int count) {
            values = new OrtValue[count];
            for (var i = 0; i < count; ++i) values[i] = new OrtValue(handles[i]);
        }
        public OrtValue this[int index] => values[index];
        public int Count => values.Length;
        public IEnumerator<OrtValue> GetEnumerator() =>
            ((IEnumerable<OrtValue>)values).GetEnumerator();
        IEnumerator IEnumerable.GetEnumerator() => values.GetEnumerator();
        public void Dispose() {
            foreach (var value in values) value.Dispose();
        }
    }

    /// <summary>What a session does after a step whose loss or gradient is not finite.</summary>
    public enum OnNotFinite {
        /// <summary>It counts the step and goes on.</summary>
        Skip,
        /// <summary>It throws <c>loss-not-finite</c> or <c>gradient-not-finite</c>.</summary>
        Stop
    }

    /// <summary>A step whose loss or gradient was not finite.</summary>
    public sealed class NotFinite {
        /// <summary>"loss-not-finite" or "gradient-not-finite".</summary>
        public string Code { get; internal set; }
        /// <summary>The optimizer step that it would have been a part of, from 1 on.</summary>
        public long Step { get; internal set; }
        /// <summary>The first ten whose gradients are not finite.</summary>
        public IReadOnlyList<string> Parameters { get; internal set; }
    }

    /// <summary>Trains a package: <c>TrainingSession</c> of ONNX Runtime 1.19 on a stock library.
    /// Parameters live in the state, as flat vectors on which all models work in place. One session
    /// takes one call at a time: a second one, from any thread, throws <c>busy</c>.</summary>
    public sealed unsafe class TrainingSession : IDisposable {
        readonly SessionHandle handle;
        readonly TrainingPackage owned; // opened for the former constructors

        public CheckpointState State { get; }
        public TrainingPackage Package { get; }

        /// <summary>Train a package with its models and session options; with its step model, where
        /// it has one.</summary>
        public TrainingSession(TrainingPackage package, CheckpointState state, int threads = 0) {
            Package = package;
            State = state;
            Native.Call(Native.odtpack_session_create(
                Ort.Api.Env, new OptionsHandle(), threads, package.Handle, state.Handle, null,
                out handle));
        }
        /// <summary>The same with options of the caller's choice, such as those of a
        /// device.</summary>
        public TrainingSession(
            SessionOptions options, TrainingPackage package, CheckpointState state) {
            Package = package;
            State = state;
            Native.Call(Native.odtpack_session_create(
                Ort.Api.Env, options.Handle, 0, package.Handle, state.Handle, null, out handle));
        }
        /// <summary>The former constructor. The models lie in the folder of their
        /// package.</summary>
        public TrainingSession(
            CheckpointState state, string trainModelPath, string evalModelPath,
            string optimizerModelPath)
            : this(null, state, trainModelPath, evalModelPath, optimizerModelPath) { }
        /// <summary>The former constructor, with options.</summary>
        public TrainingSession(
            SessionOptions options, CheckpointState state, string trainModelPath,
            string evalModelPath, string optimizerModelPath)
            : this(options, FolderOf(trainModelPath), state, trainModelPath, evalModelPath,
                optimizerModelPath) => owned = Package;
        /// <summary>With options and models of the caller's choice: those in ORT format, for
        /// example. All but the training model may be null. A step model needs the optimizer model
        /// beside it; the training model is then opened once a step asks for gradients.</summary>
        public TrainingSession(
            SessionOptions options, TrainingPackage package, CheckpointState state,
            string trainModelPath, string evalModelPath, string optimizerModelPath,
            string stepModelPath = null) {
            Package = package;
            State = state;
            fixed (byte* training = Native.Encode(trainModelPath))
            fixed (byte* evaluation = Native.Optional(evalModelPath))
            fixed (byte* optimizer = Native.Optional(optimizerModelPath))
            fixed (byte* step = Native.Optional(stepModelPath)) {
                var models = new NativeModels {
                    Training = (IntPtr)training, Evaluation = (IntPtr)evaluation,
                    Optimizer = (IntPtr)optimizer, Step = (IntPtr)step
                };
                Native.Call(Native.odtpack_session_create(
                    Ort.Api.Env, options?.Handle ?? new OptionsHandle(), 0, package.Handle,
                    state.Handle, &models, out handle));
            }
        }
        static TrainingPackage FolderOf(string model) {
            var folder = Path.GetDirectoryName(model);
            return TrainingPackage.Open(string.IsNullOrEmpty(folder) ? "." : folder);
        }

        /// <summary>Free the models; closing twice is allowed. An evaluation or a training step
        /// that runs is ended, and throws <c>closed</c>: the state is as before it. For other calls
        /// this waits, an optimizer step and one in the step model among them, which write over
        /// what they read. The state remains, and may be saved. Every later call but those that
        /// read a number or names throws <c>closed</c>.</summary>
        public void Close() => Native.Call(Native.odtpack_session_close(handle));
        /// <summary>What <see cref="Close"/> does. The state and the package belong to the
        /// caller.</summary>
        public void Dispose() {
            Close();
            owned?.Dispose();
        }

        /// <summary>Batches per optimizer step: the gradient of each is divided by this
        /// number.</summary>
        public long AccumulationSteps => Native.odtpack_session_accumulation_steps(handle);
        /// <summary>Whether <see cref="StepOn"/> and <see cref="TrainBatch"/> make steps in the
        /// package's step model.</summary>
        public bool HasStepModel => Native.odtpack_session_has_step_model(handle);
        /// <summary>Whether native kernels compute nodes of the session's models.</summary>
        public bool HasKernels => Native.odtpack_session_has_kernels(handle);
        /// <summary>Optimizer steps made, those before a resumed checkpoint included.</summary>
        public long StepCount {
            get {
                Native.Call(Native.odtpack_session_step_count(handle, out var count));
                return count;
            }
        }

        /// <summary>What follows a step whose loss or gradient is not finite: it changed
        /// nothing.</summary>
        public void SetOnNotFinite(OnNotFinite policy) => Native.Call(
            Native.odtpack_session_set_stops_on_not_finite(handle, policy == OnNotFinite.Stop));
        /// <summary>Steps that changed nothing, as their loss or a gradient was not finite; in the
        /// step model the other parameters of a step whose loss is finite were updated.</summary>
        public long SkippedSteps => Native.odtpack_session_skipped_steps(handle);
        /// <summary>The last step whose loss or gradient was not finite, or null. Ask between
        /// calls.</summary>
        public NotFinite LastNotFinite {
            get {
                Native.Call(Native.odtpack_session_last_not_finite(
                    handle, out var found, out var code, out var step, out var names));
                if (found == 0) return null;
                var parameters = names.Take().Split(
                    new[] { '\0' }, StringSplitOptions.RemoveEmptyEntries);
                return new NotFinite { Code = code.Take(), Step = step, Parameters = parameters };
            }
        }

        /// <summary>A training step and, where they are due, the optimizer's step, the schedule's
        /// and the reset: allocates nothing. Returns the loss of the batch, whose inputs are in the
        /// order of the package's.</summary>
        public double TrainBatch(IReadOnlyList<OrtValue> inputs) {
            Run(null, inputs, out var loss);
            return loss;
        }
        /// <summary>Train on batches as long as <paramref name="isActive"/> says so, which is asked
        /// before each. Returns the number of batches; the session is as after the last
        /// one.</summary>
        public long Fit(
            IEnumerable<IReadOnlyList<OrtValue>> batches, Func<bool> isActive = null) {
            if (batches == null) throw new ArgumentNullException(nameof(batches));
            long count = 0;
            foreach (var batch in batches) {
                if (isActive != null && !isActive()) break;
                TrainBatch(batch);
                ++count;
            }
            return count;
        }
        /// <summary>An optimizer step on one batch: what TrainStep, OptimizerStep and LazyResetGrad
        /// do, and with less memory where the session has a step model. Returns the user's outputs,
        /// the loss before the step first. Dispose of them. The error <c>step-of-several</c> if
        /// the package accumulates batches.</summary>
        public IDisposableReadOnlyCollection<OrtValue> StepOn(IReadOnlyList<OrtValue> inputs) =>
            Run(RunKind.StepOn, inputs, out _);
        /// <summary>Loss and gradients of a batch, which are added to those that are accumulated.
        /// Returns the user's outputs, the loss first; dispose of them. The first call closes the
        /// step model, if there is one, and opens the training model: from then on all steps are
        /// made with that.</summary>
        public IDisposableReadOnlyCollection<OrtValue> TrainStep(IReadOnlyList<OrtValue> inputs) =>
            Run(RunKind.TrainStep, inputs, out _);
        /// <summary>The loss of a batch with the evaluation model, and its other outputs; dispose
        /// of them.</summary>
        public IDisposableReadOnlyCollection<OrtValue> EvalStep(IReadOnlyList<OrtValue> inputs) =>
            Run(RunKind.EvalStep, inputs, out _);
        /// <summary>Let the next training step replace the gradients, not add to them.</summary>
        public void LazyResetGrad() => Native.Call(Native.odtpack_session_lazy_reset_grad(handle));
        /// <summary>Change the parameters by the accumulated gradients, which remain as they
        /// are.</summary>
        public void OptimizerStep() => Native.Call(Native.odtpack_session_optimizer_step(handle));

        /// <summary>The mean loss over batches, where each sample counts alike, and the share of
        /// labels whose score is the highest; that is null where the model has no labels or no
        /// scores for them.</summary>
        public (double Loss, double? Accuracy) Evaluate(
            IEnumerable<IReadOnlyList<OrtValue>> batches) {
            if (batches == null) throw new ArgumentNullException(nameof(batches));
            var sum = new NativeEvaluation();
            foreach (var batch in batches) Run(null, batch, out _, &sum);
            if (sum.Samples == 0)
                throw new OdtpackException("empty-batch", "There is no batch to evaluate.");
            return (sum.LossSum / sum.Samples,
                sum.Labels == 0 ? (double?)null : (double)sum.Right / sum.Labels);
        }

        public void SetLearningRate(float rate) =>
            Native.Call(Native.odtpack_session_set_learning_rate(handle, rate));
        public float GetLearningRate() {
            Native.Call(Native.odtpack_session_get_learning_rate(handle, out var rate));
            return rate;
        }
        /// <summary>Let the rate follow a schedule, which is saved with the state.</summary>
        public void SetSchedule(Schedule schedule, double initialRate) =>
            schedule.Use((ref NativeSchedule native) => {
                Native.Call(Native.odtpack_session_set_schedule(handle, ref native, initialRate));
                return 0;
            });
        /// <summary>Go on with the schedule that the state was saved with; false if there is
        /// none.</summary>
        public bool RestoreSchedule() {
            Native.Call(Native.odtpack_session_restore_schedule(handle, out var found));
            return found != 0;
        }
        /// <summary>The schedule that the package proposes, over so many steps if it does not say,
        /// with its rate; null if it proposes none.</summary>
        public Schedule ProposedSchedule(long totalSteps, out double rate) {
            Native.Call(Native.odtpack_session_proposed_schedule(
                handle, totalSteps, out var found, out var schedule, out rate));
            if (found == 0) return null;
            try {
                return new Schedule(schedule);
            } finally {
                Native.odtpack_free(schedule.Milestones);
            }
        }
        /// <summary>Linear warm-up from 0 to the rate, then linear decay to 0.</summary>
        public void RegisterLinearLRScheduler(
            long warmupStepCount, long totalStepCount, float initialLearningRate) {
            var written = initialLearningRate.ToString("R", CultureInfo.InvariantCulture);
            SetSchedule(
                new Schedule("linear", warmupStepCount, totalStepCount),
                double.Parse(written, CultureInfo.InvariantCulture)); // 0.001, as written
        }
        /// <summary>Set the rate of the next optimizer step.</summary>
        public void SchedulerStep() => Native.Call(Native.odtpack_session_scheduler_step(handle));

        public IReadOnlyList<string> InputNames(bool training) => NamesOf(Package.Inputs);
        public IReadOnlyList<string> OutputNames(bool training) =>
            NamesOf(training ? Package.Outputs : Package.EvaluationOutputs);
        static string[] NamesOf(IReadOnlyList<TensorSpec> specs) {
            var names = new List<string>();
            foreach (var spec in specs) names.Add(spec.Name);
            return names.ToArray();
        }

        /// <summary>All parameters, or the trainable ones, one after the other in the order of the
        /// manifest. Dispose of it.</summary>
        public OrtValue ToBuffer(bool onlyTrainable) {
            Native.Call(Native.odtpack_session_to_buffer(handle, onlyTrainable, out var buffer));
            return new OrtValue(buffer);
        }
        /// <summary>Set the parameters from such a vector.</summary>
        public void FromBuffer(OrtValue buffer, bool onlyTrainable = true) => Native.Call(
            Native.odtpack_session_from_buffer(handle, buffer.Handle, onlyTrainable));

        /// <summary>Write an inference model with the current parameters inside, whole or not at
        /// all.</summary>
        public void ExportModelForInferencing(
            string inferenceModelPath, IReadOnlyCollection<string> graphOutputNames) {
            using (var names = new Names(graphOutputNames))
                Native.Call(Native.odtpack_session_export(
                    handle, Native.Encode(inferenceModelPath), names.Pointers, names.Count));
        }
        /// <summary>Predicts with a copy of the current parameters.</summary>
        public Predictor CreatePredictor(IReadOnlyCollection<string> outputNames) {
            using (var names = new Names(outputNames)) {
                Native.Call(Native.odtpack_session_predictor(
                    handle, names.Pointers, names.Count, out var predictor));
                return new Predictor(predictor, outputNames);
            }
        }

        /// <summary>Run a batch; without a kind, as TrainBatch, or add its evaluation.</summary>
        Values Run(
            RunKind? kind, IReadOnlyList<OrtValue> inputs, out double loss,
            NativeEvaluation* sum = null) {
            if (inputs == null) throw new ArgumentNullException(nameof(inputs));
            var count = inputs.Count;
            if (count > 1024) // a manifest has no more
                throw new OdtpackException("input-count", $"A step was given {count} inputs.");
            var given = stackalloc IntPtr[count + 1];
            var room = kind == null ? 0 : Package.EvaluationOutputs.Count;
            var outputs = stackalloc IntPtr[room + 1];
            var held = 0;
            loss = 0;
            try {
                for (; held < count; ++held) {
                    var isHeld = false;
                    if (inputs[held] == null)
                        throw new ArgumentException("A value is null.", nameof(inputs));
                    inputs[held].Handle.DangerousAddRef(ref isHeld);
                    given[held] = inputs[held].Handle.DangerousGetHandle();
                }
                var size = (UIntPtr)count;
                if (kind == null) {
                    Native.Call(sum != null
                        ? Native.odtpack_session_eval_batch(handle, given, size, sum)
                        : Native.odtpack_session_train_batch(handle, given, size, out loss));
                    return null;
                }
                var made = (UIntPtr)room;
                Native.Call(Native.odtpack_session_run(
                    handle, kind.Value, given, size, outputs, ref made));
                return new Values(outputs, (int)made);
            } finally {
                while (held-- > 0) inputs[held].Handle.DangerousRelease();
            }
        }
    }
}
