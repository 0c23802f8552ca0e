"""To and from onnxruntime-training 1.19.2, the last release of its on-device training.

:func:`~odtpack.ort_training.importing.import_artifacts` turns artifacts made there into a
package; :mod:`~odtpack.ort_training.backend` makes what is built here run there.
"""
