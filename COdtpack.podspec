# The native core of the Swift kit. ODTPACK_FLATBUFFERS is the folder of flatbuffers' headers.
Pod::Spec.new do |pod|
  pod.name = 'COdtpack'
  pod.version = '0.1.0'
  pod.summary = "The native core of odtpack's kits."
  pod.homepage = 'https://odtpack.example'
  pod.license = { type: 'Apache-2.0', file: 'LICENSE' }
  pod.authors = 'The odtpack authors'
  pod.source = { git: 'https://odtpack.example/odtpack', tag: pod.version.to_s }
  pod.ios.deployment_target = '15.0'
  pod.osx.deployment_target = '12.0'
  kernels = %w[library elementwise elementwise_baseline depthwise depthwise_baseline
               normalization normalization_baseline product product_baseline]
  pod.source_files = 'runtime/cpp/src/odtpack.cpp', 'runtime/cpp/include/odtpack.h',
                     *kernels.map { |each| "runtime/native/src/#{each}.cpp" }
  pod.preserve_paths = 'runtime/cpp/include/**/*', 'runtime/native/src/*'
  pod.module_map = 'runtime/cpp/include/module.modulemap'
  pod.pod_target_xcconfig = {
    'CLANG_CXX_LANGUAGE_STANDARD' => 'c++17',
    'GCC_PREPROCESSOR_DEFINITIONS' => '$(inherited) ODTPACK_KERNELS=1',
    'HEADER_SEARCH_PATHS' => '"${PODS_TARGET_SRCROOT}/runtime/cpp/include" "${ODTPACK_FLATBUFFERS}"'
  }
  pod.dependency 'onnxruntime-c', '>= 1.23'
end
