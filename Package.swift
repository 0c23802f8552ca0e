// swift-tools-version:5.9
import PackageDescription

// On Apple's systems, put onnxruntime.xcframework of the onnxruntime-c pod beside this file. On
// Linux, pass where the headers and the library are: swift build -Xcc -I... -Xcxx -I... -Xlinker
// -L... The headers of flatbuffers, of which nothing is linked, are passed in the same way.
#if os(macOS)
let runtime: [Target] = [.binaryTarget(name: "onnxruntime", path: "onnxruntime.xcframework")]
let library: [Target.Dependency] = ["onnxruntime"]
#else
let runtime: [Target] = []
let library: [Target.Dependency] = []
#endif

// docs/native.md; without them and the definition of ODTPACK_KERNELS the bodies run.
let kernels = [
  "library", "elementwise", "elementwise_baseline", "depthwise", "depthwise_baseline",
  "normalization", "normalization_baseline", "product", "product_baseline",
]

let package = Package(
  name: "Odtpack",
  platforms: [.iOS(.v15), .macOS(.v12)],
  products: [.library(name: "Odtpack", targets: ["Odtpack"])],
  targets: runtime + [
    .target(
      name: "COdtpack", dependencies: library, path: "runtime",
      sources: ["cpp/src/odtpack.cpp"] + kernels.map { "native/src/\($0).cpp" },
      publicHeadersPath: "cpp/include", cxxSettings: [.define("ODTPACK_KERNELS")]),
    .target(
      name: "Odtpack", dependencies: ["COdtpack"], path: "runtime/swift/Sources/Odtpack",
      resources: [.copy("PrivacyInfo.xcprivacy")], linkerSettings: [.linkedLibrary("onnxruntime", .when(platforms: [.linux]))]),
  ],
  cxxLanguageStandard: .cxx17
)
