// Tokens that follow a prompt: the decoder of a package, with adapters that were trained for it.
using System;
using System.Collections.Generic;

namespace Odtpack {
    /// <summary>How tokens are chosen, and when a sequence ends.</summary>
    public sealed class GenerateOptions {
        /// <summary>Name of the adapter that counts; null for the decoder as it was
        /// exported.</summary>
        public string Adapter { get; set; }
        /// <summary>How many follow at most.</summary>
        public long MaxTokens { get; set; } = 256;
        /// <summary>Tokens that end the sequence, and are not in it.</summary>
        public IEnumerable<int> Stop { get; set; } = new int[0];
        /// <summary>0 for the likeliest token; otherwise the logits are divided by it.</summary>
        public double Temperature { get; set; }
        /// <summary>One of that many likeliest tokens is drawn; 0 for all.</summary>
        public uint TopK { get; set; }
        /// <summary>Of the likeliest that have this probability together.</summary>
        public double TopP { get; set; } = 1;
        /// <summary>The same one draws the same tokens, as in Python.</summary>
        public ulong Seed { get; set; }
    }

    /// <summary>The inference model of a decoder that was trained in segments, loaded once. Any
    /// number of adapters may be beside it, and each call says which one counts. One call at a
    /// time: a second one throws <c>busy</c>.</summary>
    public sealed unsafe class Generator : IDisposable {
        readonly GeneratorHandle handle;

        /// <summary>Load the decoder and its weights; throws <c>no-decoder</c> if the package has
        /// none. The options are the package's, with so many threads, unless others are
        /// given.</summary>
        public Generator(
            TrainingPackage package, int threads = 0, SessionOptions options = null) =>
            Native.Call(Native.odtpack_generator_create(
                Ort.Api.Env, options?.Handle ?? new OptionsHandle(), threads, package.Handle,
                out handle));
        public void Dispose() => handle.Dispose();

        /// <summary>Put an adapter beside the decoder, or in the place of the one of that name: a
        /// file or folder that <see cref="CheckpointState.SaveAdapter"/> or PEFT wrote.</summary>
        public void AddAdapter(string name, string path) =>
            Native.Call(Native.odtpack_generator_add_adapter(
                handle, Native.Encode(name), Native.Encode(path)));
        /// <summary>The same of a state, as it is whenever it is used; do not train it
        /// then.</summary>
        public void AddAdapter(string name, CheckpointState state) =>
            Native.Call(Native.odtpack_generator_add_state(
                handle, Native.Encode(name), state.Handle));
        /// <summary>Forget an adapter, if it is there.</summary>
        public void RemoveAdapter(string name) =>
            Native.Call(Native.odtpack_generator_remove_adapter(handle, Native.Encode(name)));

        /// <summary>The logits of the token after a sequence, one for each word; without an
        /// adapter those of the decoder as it was exported.</summary>
        public float[] Logits(IEnumerable<int> tokens, string adapter = null) {
            var given = Whole(tokens);
            Native.Call(Native.odtpack_generator_logits(
                handle, given, (UIntPtr)given.Length, Native.Optional(adapter), out var logits));
            using (var value = new OrtValue(logits)) return value.ToArray<float>();
        }

        /// <summary>The tokens that follow a prompt, each as soon as it is there. Every enumeration
        /// begins anew; what is wrong with an argument is thrown when it does.</summary>
        public IEnumerable<int> Generate(
            IEnumerable<int> prompt, GenerateOptions options = null) {
            using (var tokens = Begin(Whole(prompt), options ?? new GenerateOptions()))
                for (var next = Next(tokens); next >= 0; next = Next(tokens)) yield return next;
        }

        TokensHandle Begin(long[] prompt, GenerateOptions options) {
            var stop = Whole(options.Stop);
            fixed (byte* adapter = Native.Optional(options.Adapter))
            fixed (long* ends = stop) {
                var native = new NativeGenerateOptions {
                    Adapter = (IntPtr)adapter, MaxTokens = options.MaxTokens,
                    Stop = (IntPtr)ends, StopCount = (UIntPtr)stop.Length,
                    Temperature = options.Temperature, TopK = options.TopK, TopP = options.TopP,
                    Seed = options.Seed
                };
                Native.Call(Native.odtpack_tokens_begin(
                    handle, prompt, (UIntPtr)prompt.Length, ref native, out var tokens));
                return tokens;
            }
        }
        static int Next(TokensHandle tokens) {
            Native.Call(Native.odtpack_tokens_next(tokens, out var found, out var token));
            return found == 0 ? -1 : (int)token;
        }
        static long[] Whole(IEnumerable<int> tokens) =>
            Array.ConvertAll(new List<int>(tokens).ToArray(), each => (long)each);
    }
}
