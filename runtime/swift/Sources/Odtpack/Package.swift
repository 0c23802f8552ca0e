// A package: a folder whose files are those that its manifest describes
// (docs/formats/package.md).
import Foundation

/// A parameter, or a user's input or output, as the manifest describes it.
struct Spec {
  let name: String, role: String, scale: String
  let type: ElementType, modelType: ElementType?
  let sizes: [Int?]  // nil for what may vary
  let symbols: [String]  // the names of such sizes
  let classCount: Int, offset: Int, ignored: Int?

  init(_ json: Json) throws {
    name = try json["name"].text()
    role = try json["role"].text()
    scale = try json["scale"].text("")
    type = try ElementType(name: json["dtype"].text())
    let model = try json["model_dtype"]
    modelType = model.isPresent ? try ElementType(name: model.text()) : nil
    let shape = try json["shape"].list()
    symbols = shape.map { $0.value as? String ?? "" }
    sizes = try shape.map { $0.value == nil || $0.value is String ? nil : try $0.whole() }
    classCount = try json["class_count"].whole(0)
    offset = try json["offset"].whole(0)
    ignored = try json["ignore_index"].isPresent ? json["ignore_index"].whole() : nil
    guard sizes.count <= 32, sizes.allSatisfy({ ($0 ?? 0) >= 0 }) else {
      throw invalid("the shape of '\(name)'")
    }
  }
  /// The shape, where all of it is fixed and describes no more than a process can hold.
  var shape: [Int]? {
    let fixed = sizes.compactMap { $0 }
    let elements = fixed.reduce(1.0) { $0 * Double(max($1, 1)) }
    return fixed.count == sizes.count && elements <= 0x1p48 ? fixed : nil
  }
  var description: String {
    let texts = zip(sizes, symbols).map { $0.map(String.init) ?? ($1.isEmpty ? "?" : $1) }
    return "\(type)[\(texts.joined(separator: ", "))]"
  }
}

/// A package that is what its manifest says.
public final class TrainingPackage {
  public let folder: String
  let manifest: Json
  let inputs: [Spec], parameters: [Spec]
  let outputs: [Spec], evaluationOutputs: [Spec]

  /// Open a folder and check its files' paths, sizes and hashes, and given a public key, the 32
  /// bytes of one of Ed25519, the signature.
  public init(path folder: String, publicKey: Data? = nil) throws {
    self.folder = folder
    let text = try Self.content("\(folder)/manifest.json", "package-not-found")
    if let publicKey {
      let signature = try Self.content("\(folder)/manifest.sig", "not-signed")
      guard try isSignature(signature, of: text, by: publicKey) else {
        throw OdtpackError(
          "signature-wrong", "The manifest was not signed with the expected key.", place: folder)
      }
    }
    manifest = try Json(data: text)
    if try manifest["schema_version"].whole() != 1 {
      throw OdtpackError(
        "manifest-version", "The manifest has another schema version than 1.", place: folder,
        hint: "update the app")
    }
    if try manifest["target"].isPresent {
      throw OdtpackError(
        "package-target", "The package was built for onnxruntime-training.", place: folder,
        hint: "odtpack build without --target ort-training")
    }
    if try manifest["privacy"].isPresent {
      throw OdtpackError(
        "private-training",
        "The package is trained with private gradients, which this kit does not make.",
        place: folder, hint: "train it with Python, or build it without privacy")
    }
    inputs = try manifest["inputs"].list().map(Spec.init)
    outputs = try manifest["outputs"].list().map(Spec.init)
    evaluationOutputs = outputs + (try manifest["evaluation_outputs"].list([]).map(Spec.init))
    parameters = try manifest["parameters"].list().map(Spec.init)
    guard let loss = outputs.first, loss.type.isFloating else { throw invalid("there is no loss") }
    var seen: Set = ["manifest.json", "manifest.sig"]
    for (key, entry) in try manifest["files"].object() {
      for file in key == "extra" ? try entry.list() : [entry] {
        try Self.checkFile(folder, file, &seen)
      }
    }
  }

  /// The path of a file by its key in the manifest: "training_model", "checkpoint" and so on.
  public func path(_ key: String) throws -> String {
    let file = try manifest["files"][key]
    if file.isPresent { return "\(folder)/\(try file["path"].text())" }
    throw OdtpackError("package-incomplete", "The package has no \(key).", place: folder)
  }
  /// The path of the model that makes a whole step, where the package has one and takes it for its
  /// steps of one batch.
  public func stepModel() throws -> String? {
    let has = try manifest["files"]["step_model"].isPresent
    return try has && manifest["accumulation_steps"].whole(1) == 1 ? path("step_model") : nil
  }
  /// The path of a model in ORT format.
  public func ortModel(of model: String, style: String = "fixed", platform: String = "") throws
    -> String
  {
    for file in try manifest["files"]["extra"].list([]) {
      if try file["role"].text() == "ort_model" && file["of"].text("") == model
        && file["style"].text("") == style && file["platform"].text("") == platform
      {
        return "\(folder)/\(try file["path"].text())"
      }
    }
    throw OdtpackError(
      "no-ort-model", "The package holds no such \(model) in ORT format.", place: folder,
      hint: "odtpack ort \(folder) --style \(style)")
  }

  /// The session options that the package asks for; `threads` of 0 leave the choice to it.
  public func sessionOptions(threads: Int = 0) throws -> ORTSessionOptions {
    var session = try manifest["session"]
    if !session.isPresent {  // an older package
      let config = ["session.force_spinning_stop": "1"]
      session = Json(
        ["optimization_level": "extended", "memory_pattern": false, "config": config],
        name: "session")
    }
    guard
      let level = ORTGraphOptimizationLevel(
        rawValue: try session["optimization_level"].text("all"))
    else { throw invalid("there is no such optimization level") }
    let options = try ORTSessionOptions()
    try options.setGraphOptimizationLevel(level)
    if try !session["memory_pattern"].flag(true) {
      try check(api.DisableMemPattern(options.handle))
    }
    if try !session["arena"].flag(true) { try check(api.DisableCpuMemArena(options.handle)) }
    if try !session["prepacking"].flag(true) {
      try options.addConfigEntry(withKey: "session.disable_prepacking", value: "1")
    }
    try options.setIntraOpNumThreads(threads > 0 ? threads : session["threads"].whole(0))
    let config = try session["config"]
    for (key, value) in config.isPresent ? try config.object() : [:] {
      try options.addConfigEntry(withKey: key, value: value.text())
    }
    if try sharedArena() != nil {
      try options.addConfigEntry(withKey: "session.use_env_allocators", value: "1")
    }
    return options
  }

  /// Sizes of the arena from which all sessions of a training take their memory, by ONNX Runtime's
  /// names for them; nil without such an arena.
  func sharedArena() throws -> [String: Int]? {
    let session = try manifest["session"]
    guard try session.isPresent, try session["shared_allocator"].flag(false) else { return nil }
    var sizes: [String: Int] = [:]
    for key in ["initial_chunk_size_bytes", "max_dead_bytes_per_chunk"] {
      guard try session[key].isPresent else { continue }
      let bytes = try session[key].whole()
      guard (256...1 << 30).contains(bytes) else {
        throw invalid("'session.\(key)' is not between 256 and 2^30")
      }
      sizes[key] = bytes
    }
    return sizes
  }

  private static func content(_ path: String, _ code: String) throws -> Data {
    if isLink(path) { throw OdtpackError("package-path", "\(path) is a link.") }
    do {
      let data = try map(path)
      if data.count > 64 << 20 { throw invalid("it has more than 64 MiB") }
      return data
    } catch let error as SystemError {
      throw OdtpackError(
        code, "\(path) cannot be read: \(systemMessage(error.code)).",
        hint: "copy the whole folder of the package")
    }
  }

  private static func checkFile(_ root: String, _ file: Json, _ seen: inout Set<String>) throws {
    let name = try file["path"].text()
    func require(_ good: Bool, _ code: String, _ problem: String) throws {
      if good { return }
      throw OdtpackError(
        code, "The package's file '\(name)' \(problem).", place: root,
        hint: "copy the whole folder again, or build the package again")
    }
    var isInside =
      !name.isEmpty && name.utf8.count <= 255 && seen.insert(name).inserted
      && !name.utf8.contains { $0 < 0x20 || $0 == 0x7F || "\\:<>\"|?*".utf8.contains($0) }
    var path = root
    for part in name.split(separator: "/", omittingEmptySubsequences: false) where isInside {
      path += "/\(part)"
      isInside = !["", ".", ".."].contains(part) && !isLink(path)
    }
    try require(isInside, "package-path", "does not lie inside the package")
    try require(isRegularFile(path), "package-incomplete", "is missing")
    let size = try file["size_bytes"].whole(), hash = try file["sha256"].text()
    do {
      let content = try map(path)
      try require(
        content.count == size && hex(sha256Mapped(content)) == hash, "package-changed",
        "is not the one that the manifest describes")
    } catch let error as SystemError {
      try require(false, "package-incomplete", "cannot be read: \(systemMessage(error.code))")
    }
  }
}
