/* The C++ kit through C: for the other languages' kits, and for C. C99.
 *
 * - Handles are opaque. What a function makes belongs to the caller, who hands it to the function
 *   whose name ends in `_release`, or to `odtpack_free` where the comment says so.
 * - A function that can fail returns an error, or NULL when all went well; then, and only then, its
 *   results are set. No exception leaves it.
 * - Tensors, environments and session options are those of the app's ONNX Runtime, whose API is
 *   handed in: this library is not linked to one. An environment outlives the sessions made in it.
 * - Text is UTF-8. An argument that may be NULL says so.
 * - A session takes one call at a time: a second one, from any thread, gets the error `busy`.
 */
#ifndef ODTPACK_H
#define ODTPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__has_include)
#if !__has_include(<onnxruntime_c_api.h>)
#define ODTPACK_ONNXRUNTIME_FRAMEWORK /* as the one for Apple's systems has it */
#endif
#endif
#ifdef ODTPACK_ONNXRUNTIME_FRAMEWORK
#include <onnxruntime/onnxruntime_c_api.h>
#else
#include <onnxruntime_c_api.h>
#endif

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. It grows with every change that breaks callers. */
#define ODTPACK_VERSION 1
int32_t odtpack_version(void);

typedef struct odtpack_error odtpack_error;
typedef struct odtpack_package odtpack_package;
typedef struct odtpack_state odtpack_state;
typedef struct odtpack_session odtpack_session;
typedef struct odtpack_memory odtpack_memory;
typedef struct odtpack_generator odtpack_generator;
typedef struct odtpack_tokens odtpack_tokens;

/* Text that the caller frees: odtpack_free(text.bytes). A zero follows its `size` bytes. */
typedef struct odtpack_text {
  char* bytes;
  size_t size;
} odtpack_text;
void odtpack_free(void* memory);

/* ---- Errors. Codes are those of the Python runtime, such as "checkpoint-corrupt". ---- */

const char* odtpack_error_code(const odtpack_error* error);
const char* odtpack_error_message(const odtpack_error* error);
const char* odtpack_error_place(const odtpack_error* error); /* may be "" */
const char* odtpack_error_hint(const odtpack_error* error);  /* may be "" */
void odtpack_error_release(odtpack_error* error);

/* ---- ONNX Runtime. Call odtpack_init once, before anything else. ---- */

/* `base` is what the app's OrtGetApiBase() returns: 1.17 or newer. */
odtpack_error* odtpack_init(const OrtApiBase* base);
/* Keep ONNX Runtime from sending telemetry. Call it before the first environment is made. */
void odtpack_disable_telemetry(void);

/* ---- Packages ---- */

/* Whether `signature`, 64 bytes, is that of the manifest's bytes, made with Ed25519. */
typedef bool (*odtpack_signature_check)(void* context, const uint8_t* manifest, size_t size,
                                        const uint8_t* signature);
/* Open a folder; check its files, and the signature unless `check` is NULL. */
odtpack_error* odtpack_package_open(const char* folder, odtpack_signature_check check,
                                    void* context, odtpack_package** package);
void odtpack_package_release(odtpack_package* package);
/* Check a manifest by itself, of which no file is there yet. */
odtpack_error* odtpack_manifest_check(const void* bytes, size_t size);

typedef enum odtpack_list {
  ODTPACK_INPUTS = 0,
  ODTPACK_OUTPUTS = 1,
  ODTPACK_EVALUATION_OUTPUTS = 2, /* the outputs and what the evaluation model alone returns */
  ODTPACK_PARAMETERS = 3,
  ODTPACK_ADAPTER = 4 /* those of the parameters that are the adapter's; none without one */
} odtpack_list;
/* What the manifest says of an input, output or parameter; it lives as long as the package. */
typedef struct odtpack_spec {
  const char* name;
  const char* role; /* of a parameter: "trainable", "state" or "frozen" */
  ONNXTensorElementDataType type;
  const int64_t* shape; /* -1 for what may vary */
  size_t rank;
  int64_t class_count; /* of labels; 0 if there is none */
  bool has_ignore_index;
  int64_t ignore_index;
} odtpack_spec;
size_t odtpack_package_count(const odtpack_package* package, odtpack_list list);
/* False if there are not so many. */
bool odtpack_package_spec(const odtpack_package* package, odtpack_list list, size_t index,
                          odtpack_spec* spec);

/* The path of a file by its key in the manifest: "training_model", "checkpoint" and so on. */
odtpack_error* odtpack_package_path(const odtpack_package* package, const char* key,
                                    odtpack_text* path);
/* The path of the step model; `bytes` is NULL where steps are not made with one. */
odtpack_error* odtpack_package_step_model(const odtpack_package* package, odtpack_text* path);
odtpack_error* odtpack_package_ort_model(const odtpack_package* package, const char* model,
                                         const char* style, const char* platform,
                                         odtpack_text* path);
/* The session options that the package asks for; `threads`: at most 256, or 0 for its choice. */
odtpack_error* odtpack_package_session_options(const odtpack_package* package, int32_t threads,
                                               OrtSessionOptions** options);
/* Train a made-up batch for a few steps and compare with what the build measured. */
odtpack_error* odtpack_package_self_check(const odtpack_package* package, const OrtEnv* env);
/* The same with options, such as those of a device. */
odtpack_error* odtpack_package_self_check_with(const odtpack_package* package, const OrtEnv* env,
                                               const OrtSessionOptions* options);

/* Let the sessions of these options run on a plug-in of ONNX Runtime 1.23 or newer, a WebGPU library
 * for example: its path, and the number of the device among those that it finds. Parameters,
 * gradients and moments then live in the device's memory. Tensors of a batch are made with
 * OrtMemTypeDefault. */
odtpack_error* odtpack_add_device(const OrtEnv* env, OrtSessionOptions* options,
                                  const char* library, size_t index);

/* ---- Schedules of the learning rate ---- */

typedef struct odtpack_schedule {
  const char* kind; /* "constant", "linear", "cosine", "step" or "multistep" */
  int64_t warmup_steps, total_steps, period;
  double floor, gamma;
  const int64_t* milestones;
  size_t milestone_count;
} odtpack_schedule;
odtpack_error* odtpack_schedule_check(const odtpack_schedule* schedule);
/* The fraction of the initial rate that holds after `step` steps; NaN for a schedule that is not valid. */
double odtpack_schedule_factor(const odtpack_schedule* schedule, int64_t step);

/* ---- States: parameters, properties, and what the optimizer carries ---- */

/* Load a checkpoint; if it is damaged or missing, the save before it, if that was kept. */
odtpack_error* odtpack_state_load(const char* path, odtpack_state** state);
odtpack_error* odtpack_state_load_buffer(const void* bytes, size_t size, odtpack_state** state);
void odtpack_state_release(odtpack_state* state);
/* Save to one file, whole or not at all. With `keep_previous` the file that is replaced is kept as
 * `<path>.previous`, if it is whole. */
odtpack_error* odtpack_state_save(const odtpack_state* state, const char* path,
                                  bool optimizer_state, bool keep_previous);
/* The same; if the tensors have more than `external_above` bytes, they go into a file of their own,
 * `<path>.data`. odtpack_state_save does that above 1.8 GB, which one file cannot hold. */
odtpack_error* odtpack_state_save_above(const odtpack_state* state, const char* path,
                                        bool optimizer_state, bool keep_previous,
                                        uint64_t external_above);
/* What was lost, if the save before was loaded; otherwise `bytes` is NULL. */
odtpack_error* odtpack_state_recovered(const odtpack_state* state, odtpack_text* text);
bool odtpack_state_is_checked(const odtpack_state* state); /* its file had a digest */
bool odtpack_state_is_nominal(const odtpack_state* state); /* parameters have no values yet */

typedef enum odtpack_property_kind {
  ODTPACK_INT = 0,
  ODTPACK_FLOAT = 1,
  ODTPACK_STRING = 2
} odtpack_property_kind;
typedef struct odtpack_property {
  odtpack_property_kind kind;
  int64_t whole;     /* of an ODTPACK_INT */
  float real;        /* of an ODTPACK_FLOAT */
  odtpack_text text; /* of an ODTPACK_STRING; free it when it was handed out */
} odtpack_property;
/* Waits for a call that runs, as it can return no error; the others here are `busy` then. */
size_t odtpack_state_property_count(const odtpack_state* state);
/* A property, in the order of names. */
odtpack_error* odtpack_state_property_at(const odtpack_state* state, size_t index,
                                         odtpack_text* name, odtpack_property* property);
/* A NULL property is removed. */
odtpack_error* odtpack_state_set_property(odtpack_state* state, const char* name,
                                          const odtpack_property* property);
odtpack_error* odtpack_state_get_property(const odtpack_state* state, const char* name,
                                          odtpack_property* property);

size_t odtpack_state_parameter_count(const odtpack_state* state);
/* The name of a parameter, in the order of names, whether it is trained, and of what type it is. */
odtpack_error* odtpack_state_parameter_info(const odtpack_state* state, size_t index,
                                            odtpack_text* name, bool* trainable,
                                            ONNXTensorElementDataType* type);
/* The parameter itself, not a copy: it shows the training's progress. `value` is valid until
 * `memory` is released; release the value first, with ReleaseValue. The first session that is made
 * of the state moves what it trains: one that was taken before shows the value of then; take it
 * again. */
odtpack_error* odtpack_state_parameter(const odtpack_state* state, size_t index, OrtValue** value,
                                       odtpack_memory** memory);
void odtpack_memory_release(odtpack_memory* memory);
/* Where the optimizer stands; `found` is false without one. `moments` counts all vectors. */
odtpack_error* odtpack_state_optimizer(const odtpack_state* state, bool* found, int64_t* step,
                                       float* learning_rate, odtpack_text* kind, size_t* moments);
/* What it keeps of a parameter, in the order of the file, as a parameter is returned: `number` is 0
 * for the first vector of each parameter, `group` its group's number. */
odtpack_error* odtpack_state_moment(const odtpack_state* state, size_t index, odtpack_text* name,
                                    size_t* number, size_t* group, OrtValue** value,
                                    odtpack_memory** memory);

/* Set all parameters to those of a complete checkpoint of the same model. */
odtpack_error* odtpack_state_load_parameters(odtpack_state* state, const char* path);
/* Bring trained parameters into the state of a newer package's checkpoint, before a session is made
 * of it: afterwards this is the error `busy`. If `names` is NULL, those that were trained; otherwise
 * the `count` of the list, of which 0 carry no parameter. Properties go over in any case, but
 * for the schedule of the learning rate, which goes with the optimizer's state. */
odtpack_error* odtpack_state_carry_over(odtpack_state* state, const odtpack_state* trained,
                                        const char* const* names, size_t count,
                                        bool optimizer_state);

/* Write the adapter of a state: to a file whose name ends in ".onnx_adapter", which ONNX Runtime's own
 * adapters read, or to a folder, made if needed, with PEFT's two files. */
odtpack_error* odtpack_adapter_save(const odtpack_package* package, const odtpack_state* state,
                                    const char* path);
/* Set the trained parameters to those of such a file or folder, all of them or none. */
odtpack_error* odtpack_adapter_load(const odtpack_package* package, odtpack_state* state,
                                    const char* path);

/* ---- Sessions ---- */

typedef struct odtpack_models {
  const char *training, *evaluation, *optimizer, *step; /* all but the first may be NULL */
} odtpack_models;
/* Train a package. If `options` is NULL: as the package asks for, with so many threads. If `models`
 * is NULL: those of the package. The session refers to nothing that was handed in but `env`. */
odtpack_error* odtpack_session_create(const OrtEnv* env, const OrtSessionOptions* options,
                                      int32_t threads, const odtpack_package* package,
                                      odtpack_state* state, const odtpack_models* models,
                                      odtpack_session** session);
/* Free the models. An evaluation or a training step that runs is ended, which changes nothing, and is
 * the error `closed`; other calls are waited for. Later calls are the error `closed`, except for those
 * that read a number; closing twice is allowed. */
odtpack_error* odtpack_session_close(odtpack_session* session);
void odtpack_session_release(odtpack_session* session);

typedef enum odtpack_run {
  ODTPACK_STEP_ON = 0,    /* a whole step: training, optimizer, reset; `step-of-several` where a step
                           * takes more than one batch */
  ODTPACK_TRAIN_STEP = 1, /* loss and gradients, which are added to those that are accumulated */
  ODTPACK_EVAL_STEP = 2   /* the loss with the evaluation model */
} odtpack_run;
/* Run a batch, whose `count` inputs are in the manifest's order. At most `*output_count` outputs are
 * returned, the loss first, for ReleaseValue; the count is set to what was returned. */
odtpack_error* odtpack_session_run(odtpack_session* session, odtpack_run run,
                                   const OrtValue* const* inputs, size_t count, OrtValue** outputs,
                                   size_t* output_count);
/* One batch of a whole training: a training step and, where they are due, the optimizer's step, the
 * schedule's and the reset. */
odtpack_error* odtpack_session_train_batch(odtpack_session* session, const OrtValue* const* inputs,
                                           size_t count, double* loss);
/* What the batches of an evaluation add up to, zeros at first. The mean loss is loss_sum / samples, the
 * accuracy right / labels; no labels are counted where the model has none or no scores for them. */
typedef struct odtpack_evaluation {
  double loss_sum; /* over the samples */
  int64_t samples, right, labels;
} odtpack_evaluation;
/* Evaluate a batch, and add it to those before. */
odtpack_error* odtpack_session_eval_batch(odtpack_session* session, const OrtValue* const* inputs,
                                          size_t count, odtpack_evaluation* sum);
odtpack_error* odtpack_session_lazy_reset_grad(odtpack_session* session);
odtpack_error* odtpack_session_optimizer_step(odtpack_session* session);
bool odtpack_session_has_step_model(const odtpack_session* session);
/* Whether native kernels compute nodes of its models (docs/native.md). The entry `odtpack.native` of
 * the session options, set to 0, and the environment variable ODTPACK_NATIVE=0 turn them off. */
bool odtpack_session_has_kernels(const odtpack_session* session);
int64_t odtpack_session_accumulation_steps(const odtpack_session* session);
/* Optimizer steps made, those before a resumed checkpoint included. */
odtpack_error* odtpack_session_step_count(const odtpack_session* session, int64_t* count);

/* A batch whose loss or gradients are not finite changes nothing, except that a step model updates the
 * parameters whose gradients are finite if the loss is: the session counts it and goes on, or, if it
 * `stops`, returns the error `loss-not-finite` or `gradient-not-finite`. */
odtpack_error* odtpack_session_set_stops_on_not_finite(odtpack_session* session, bool stops);
int64_t odtpack_session_skipped_steps(const odtpack_session* session);
/* The last such batch, if there was one: the error's code, the optimizer step, and the names of the
 * first ten parameters concerned, each of which ends with a zero. Ask between calls. */
odtpack_error* odtpack_session_last_not_finite(const odtpack_session* session, bool* found,
                                               odtpack_text* code, int64_t* step,
                                               odtpack_text* parameters);

odtpack_error* odtpack_session_set_learning_rate(odtpack_session* session, float rate);
odtpack_error* odtpack_session_get_learning_rate(const odtpack_session* session, float* rate);
odtpack_error* odtpack_session_set_schedule(odtpack_session* session,
                                            const odtpack_schedule* schedule, double initial_rate);
/* The schedule that the package proposes, over `total_steps` if it does not say, and its rate.
 * `found` is false if it proposes none. Free `milestones` with odtpack_free. */
odtpack_error* odtpack_session_proposed_schedule(const odtpack_session* session,
                                                 int64_t total_steps, bool* found,
                                                 odtpack_schedule* schedule, double* rate);
/* Go on with the schedule that the state was saved with; `found` is false if there is none. */
odtpack_error* odtpack_session_restore_schedule(odtpack_session* session, bool* found);
odtpack_error* odtpack_session_scheduler_step(odtpack_session* session);

/* All parameters, or the trainable ones, one after the other in the order of the manifest. */
odtpack_error* odtpack_session_to_buffer(odtpack_session* session, bool only_trainable,
                                         OrtValue** buffer);
odtpack_error* odtpack_session_from_buffer(odtpack_session* session, const OrtValue* buffer,
                                           bool only_trainable);
/* Write an inference model with the current parameters inside. */
odtpack_error* odtpack_session_export(odtpack_session* session, const char* path,
                                      const char* const* outputs, size_t count);
/* A session of ONNX Runtime that predicts with a copy of the current parameters. */
odtpack_error* odtpack_session_predictor(odtpack_session* session, const char* const* outputs,
                                         size_t count, OrtSession** predictor);

/* ---- Generation: the decoder of a package, with adapters that were trained for it ---- */

/* Load the decoder, whose weights are those of the training. If `options` is NULL: as the package
 * asks for, with so many threads. A generator takes one call at a time, as a session does, those of
 * its tokens included. */
odtpack_error* odtpack_generator_create(const OrtEnv* env, const OrtSessionOptions* options,
                                        int32_t threads, const odtpack_package* package,
                                        odtpack_generator** generator);
void odtpack_generator_release(odtpack_generator* generator);
/* Put an adapter beside the decoder, or in the place of the one of that name: a file or folder that
 * odtpack_adapter_save or PEFT wrote; or a state, as it is at each later call, which is `busy` if a
 * call of the state runs when it begins; do not train it during one. The decoder is not loaded
 * again. */
odtpack_error* odtpack_generator_add_adapter(odtpack_generator* generator, const char* name,
                                             const char* path);
odtpack_error* odtpack_generator_add_state(odtpack_generator* generator, const char* name,
                                           const odtpack_state* state);
/* Forget an adapter, if it is there; tokens that are being made keep it. */
odtpack_error* odtpack_generator_remove_adapter(odtpack_generator* generator, const char* name);
/* The logits of the token after a sequence: float, one for each word. Without an adapter (NULL) the
 * decoder is as it was exported. */
odtpack_error* odtpack_generator_logits(odtpack_generator* generator, const int64_t* tokens,
                                        size_t count, const char* adapter, OrtValue** logits);

typedef struct odtpack_generate_options {
  const char* adapter; /* its name; NULL for the decoder as it was exported */
  int64_t max_tokens;  /* how many follow at most */
  const int64_t* stop; /* tokens that end the sequence, and are not in it */
  size_t stop_count;
  double temperature; /* 0 for the likeliest token; otherwise the logits are divided by it */
  uint64_t top_k;     /* one of that many likeliest tokens is drawn; 0 for all */
  double top_p;       /* of the likeliest that have this probability together: above 0, up to 1 */
  uint64_t seed;      /* the same one draws the same tokens, in every language */
} odtpack_generate_options;
/* Begin a sequence that follows a prompt; if `options` is NULL, of the 256 likeliest tokens. Any
 * number of sequences may take turns. */
odtpack_error* odtpack_tokens_begin(odtpack_generator* generator, const int64_t* prompt,
                                    size_t count, const odtpack_generate_options* options,
                                    odtpack_tokens** tokens);
/* Make the next token; `found` is false at the end, which an error other than `busy` is as well. */
odtpack_error* odtpack_tokens_next(odtpack_tokens* tokens, bool* found, int64_t* token);
/* The generator is freed with the last of its tokens, if it was released before. */
void odtpack_tokens_release(odtpack_tokens* tokens);

/* ---- What a device reaches, as JSON for `odtpack devices import`: about half a minute ---- */

/* `memory_limit` is what the system grants this app in bytes, 0 if it does not tell. */
odtpack_error* odtpack_benchmark(const OrtEnv* env, const char* kit, const char* folder,
                                 int32_t threads, uint64_t memory_limit, uint64_t file_bytes,
                                 double load_minutes, odtpack_text* json);

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#endif
