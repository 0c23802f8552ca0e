// A package: a folder whose files are those that its manifest describes
// (docs/formats/package.md).
import COdtpack
import Foundation

#if canImport(CryptoKit)
import CryptoKit
#endif

/// An input or output, as the manifest describes it.
struct Spec {
  let name: String, type: ElementType?
  let sizes: [Int?]  // nil for what may vary
  let classCount: Int, ignored: Int?

  init(_ spec: odtpack_spec) {
    name = String(cString: spec.name)
    type = ElementType(rawValue: Int(spec.type.rawValue))
    sizes = UnsafeBufferPointer(start: spec.shape, count: spec.rank).map { $0 < 0 ? nil : Int($0) }
    classCount = Int(spec.class_count)
    ignored = spec.has_ignore_index ? Int(spec.ignore_index) : nil
  }
}

/// A package that is what its manifest says.
public final class TrainingPackage {
  public let folder: String
  let handle: OpaquePointer
  let inputs: [Spec], outputs: [Spec], evaluationOutputs: [Spec]

  /// Open a folder and check its files' paths, sizes and hashes, and given a public key, the 32
  /// bytes of one of Ed25519, the signature.
  public init(path folder: String, publicKey: Data? = nil) throws {
    self.folder = try plain(folder)
    let handle: OpaquePointer
    if let publicKey {
      let check = SignatureCheck(publicKey)
      do {
        handle = try made { package in
          odtpack_package_open(
            folder,
            { context, manifest, size, signature in
              Unmanaged<SignatureCheck>.fromOpaque(context!).takeUnretainedValue()
                .isRight(Data(bytes: manifest!, count: size), Data(bytes: signature!, count: 64))
            }, Unmanaged.passUnretained(check).toOpaque(), package)
        }
      } catch {
        throw check.error ?? error
      }
    } else {
      handle = try made { odtpack_package_open(folder, nil, nil, $0) }
    }
    self.handle = handle
    func specs(_ list: odtpack_list) -> [Spec] {
      (0..<odtpack_package_count(handle, list)).map { index in
        var spec = odtpack_spec()
        _ = odtpack_package_spec(handle, list, index, &spec)
        return Spec(spec)
      }
    }
    inputs = specs(ODTPACK_INPUTS)
    outputs = specs(ODTPACK_OUTPUTS)
    evaluationOutputs = specs(ODTPACK_EVALUATION_OUTPUTS)
  }
  deinit { odtpack_package_release(handle) }

  /// The path of a file by its key in the manifest: "training_model", "checkpoint" and so on.
  public func path(_ key: String) throws -> String {
    try text { try odtpack_package_path(handle, plain(key), $0) }!
  }
  /// The path of the model that makes a whole step, where the package has one and takes it for its
  /// steps of one batch.
  public func stepModel() throws -> String? {
    try text { odtpack_package_step_model(handle, $0) }
  }
  /// The path of a model in ORT format.
  public func ortModel(of model: String, style: String = "fixed", platform: String = "") throws
    -> String
  {
    try text {
      try odtpack_package_ort_model(handle, plain(model), plain(style), plain(platform), $0)
    }!
  }
  /// The session options that the package asks for; `threads` of 0 leave the choice to it.
  public func sessionOptions(threads: Int = 0) throws -> ORTSessionOptions {
    ORTSessionOptions(
      owning: try made {
        odtpack_package_session_options(handle, Int32(clamping: threads), $0)
      })
  }
  /// Train the package's made-up batch for a few steps and compare with what the build measured:
  /// tells within seconds whether training is right on this device. Throws if not.
  public func selfCheck(_ env: ORTEnv) throws {
    try call(odtpack_package_self_check(handle, env.handle))
  }
  /// The same on the device of these options.
  public func selfCheck(_ env: ORTEnv, options: ORTSessionOptions) throws {
    try call(odtpack_package_self_check_with(handle, env.handle, options.handle))
  }
}

private final class SignatureCheck {
  private let key: Data
  private(set) var error: Error?

  init(_ key: Data) { self.key = key }

  func isRight(_ manifest: Data, _ signature: Data) -> Bool {
    #if canImport(CryptoKit)
    let key = try? Curve25519.Signing.PublicKey(rawRepresentation: key)
    return key?.isValidSignature(signature, for: manifest) ?? false
    #else
    error = OdtpackError(
      "cryptography-missing", "The signature cannot be checked here: there is no CryptoKit.",
      hint: "check manifest.sig with a library of Ed25519, and open the package without a key")
    return false
    #endif
  }
}
