Pod::Spec.new do |pod|
  pod.name = 'Odtpack'
  pod.version = '0.1.0'
  pod.summary = 'Trains odtpack packages on the ONNX Runtime that an app already ships.'
  pod.homepage = 'https://odtpack.example'
  pod.license = { type: 'Apache-2.0', file: 'LICENSE' }
  pod.authors = 'The odtpack authors'
  pod.source = { git: 'https://odtpack.example/odtpack', tag: pod.version.to_s }
  pod.ios.deployment_target = '15.0'
  pod.osx.deployment_target = '12.0'
  pod.swift_version = '5.9'
  pod.source_files = 'runtime/swift/Sources/Odtpack/*.swift'
  pod.resource_bundles = { 'Odtpack' => ['runtime/swift/Sources/Odtpack/PrivacyInfo.xcprivacy'] }
  pod.dependency 'COdtpack', pod.version.to_s
end
