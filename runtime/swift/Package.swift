// swift-tools-version:5.9
import PackageDescription

// On Apple's systems, put onnxruntime.xcframework of the onnxruntime-c pod beside this file. On
// Linux, pass where the header and the library are: swift build -Xcc -I... -Xlinker -L...
#if os(macOS)
let runtime: [Target] = [.binaryTarget(name: "onnxruntime", path: "onnxruntime.xcframework")]
let library: [Target.Dependency] = ["COnnxRuntime", "onnxruntime"]
#else
let runtime: [Target] = []
let library: [Target.Dependency] = ["COnnxRuntime"]
#endif

let package = Package(
  name: "Odtpack",
  platforms: [.iOS(.v15), .macOS(.v12)],
  products: [.library(name: "Odtpack", targets: ["Odtpack"])],
  targets: runtime + [
    .systemLibrary(name: "COnnxRuntime"),
    .target(
      name: "Odtpack", dependencies: library,
      linkerSettings: [.linkedLibrary("onnxruntime", .when(platforms: [.linux]))]),
  ]
)
