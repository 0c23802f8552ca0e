namespace Odtpack {
    public static class Device {
        /// <summary>What this device reaches through ONNX Runtime, as JSON for
        /// <c>odtpack devices import</c> (docs/formats/measurements.md): matrix products,
        /// convolutions, copies and storage, each five times, in about half a minute.
        /// <paramref name="memoryLimit"/> is what the system grants this app in bytes, 0 if it does
        /// not tell.</summary>
        public static string Benchmark(
            string folder, int threads, ulong memoryLimit = 0, ulong fileBytes = 64 << 20) {
            Native.Call(Native.odtpack_benchmark(
                Ort.Api.Env, Native.Encode("csharp"), Native.Encode(folder), threads, memoryLimit,
                fileBytes, 0, out var json));
            return json.Take();
        }
    }
}
