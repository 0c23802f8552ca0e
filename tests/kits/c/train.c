/* Trains a package through odtpack.h, in C99, with an ONNX Runtime that is opened by its path, and
 * prints a loss a line. Then it saves, keeps what was saved before, reads the state while another
 * thread evaluates, and closes.
 *
 *     train LIBONNXRUNTIME PACKAGE IMAGES LABELS SAVE
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "odtpack.h"

static void check(odtpack_error* error) {
  if (error == NULL) return;
  fprintf(stderr, "%s: %s\n%s\n%s\n", odtpack_error_code(error), odtpack_error_message(error),
          odtpack_error_place(error), odtpack_error_hint(error));
  odtpack_error_release(error);
  exit(2);
}

/* The code of an error that must come. */
static void expect(odtpack_error* error, const char* code) {
  if (error == NULL || strcmp(odtpack_error_code(error), code) != 0) {
    fprintf(stderr, "%s did not come, but %s\n", code,
            error == NULL ? "nothing" : odtpack_error_code(error));
    exit(3);
  }
  odtpack_error_release(error);
}

static OrtValue* tensor(const OrtApi* api, const char* path, const int64_t* shape, size_t rank,
                        ONNXTensorElementDataType type, size_t size) {
  OrtAllocator* allocator = NULL;
  OrtValue* value = NULL;
  void* data = NULL;
  for (size_t i = 0; i < rank; ++i) size *= (size_t)shape[i];
  if (api->GetAllocatorWithDefaultOptions(&allocator) != NULL ||
      api->CreateTensorAsOrtValue(allocator, shape, rank, type, &value) != NULL ||
      api->GetTensorMutableData(value, &data) != NULL)
    exit(4);
  FILE* file = fopen(path, "rb");
  if (file == NULL || fread(data, 1, size, file) != size) exit(4);
  fclose(file);
  return value;
}

/* Whether a call was refused with this code. */
static bool is(odtpack_error* error, const char* code) {
  if (error == NULL) return false;
  expect(error, code);
  return true;
}

/* What reads a state is a call: it and an evaluation in another thread never run at once. */
struct evaluation {
  const OrtApi* api;
  odtpack_session* session;
  const OrtValue** batch;
};
static void* evaluate(void* argument) {
  struct evaluation* of = (struct evaluation*)argument;
  odtpack_error* error = NULL;
  for (;;) {
    OrtValue* loss[1];
    size_t size = 1;
    error = odtpack_session_run(of->session, ODTPACK_EVAL_STEP, of->batch, 2, loss, &size);
    if (error == NULL)
      of->api->ReleaseValue(loss[0]);
    else if (strcmp(odtpack_error_code(error), "closed") == 0)
      break;
    else
      expect(error, "busy");
  }
  odtpack_error_release(error);
  return NULL;
}
static void read_beside(const OrtApi* api, const odtpack_state* state) {
  bool seen[3] = {false, false, false};
  while (!seen[0] || !seen[1] || !seen[2]) {
    odtpack_text text;
    odtpack_property property;
    odtpack_memory* memory = NULL;
    OrtValue* value = NULL;
    int64_t step = 0;
    bool found = false;
    float rate = 0;
    size_t moments = 0;
    if (odtpack_state_property_count(state) != 1) exit(5); /* the schedule */
    if (is(odtpack_state_property_at(state, 0, &text, &property), "busy")) {
      seen[0] = true;
    } else {
      odtpack_free(text.bytes);
      odtpack_free(property.text.bytes);
    }
    if (is(odtpack_state_optimizer(state, &found, &step, &rate, &text, &moments), "busy")) {
      seen[1] = true;
    } else {
      if (!found || step != 12) exit(5);
      odtpack_free(text.bytes);
    }
    if (is(odtpack_state_parameter(state, 0, &value, &memory), "busy")) {
      seen[2] = true;
    } else {
      api->ReleaseValue(value);
      odtpack_memory_release(memory);
    }
  }
}

/* Reads the numbers of a session while it makes its twelve steps. */
static void* watch(void* session) {
  for (int64_t steps = 0; steps < 12;) {
    float rate = 0;
    check(odtpack_session_step_count((odtpack_session*)session, &steps));
    check(odtpack_session_get_learning_rate((odtpack_session*)session, &rate));
    if (odtpack_session_has_step_model((odtpack_session*)session)) exit(6);
    if (odtpack_session_skipped_steps((odtpack_session*)session) != 0) exit(6);
  }
  return NULL;
}

/* An ONNX Runtime that is too old. */
static const OrtApi* ORT_API_CALL api_before_17(uint32_t version) NO_EXCEPTION {
  (void)version;
  return NULL;
}
static const char* ORT_API_CALL version_before_17(void) NO_EXCEPTION { return "1.16.3"; }
static const OrtApiBase older = {api_before_17, version_before_17};

int main(int count, char** words) {
  if (count != 6 || odtpack_version() != ODTPACK_VERSION) return 1;
  void* library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return 1;
  const OrtApiBase* (*base)(void) = NULL;
  *(void**)&base = dlsym(library, "OrtGetApiBase"); /* the way that POSIX shows */
  odtpack_package* package = NULL;
  expect(odtpack_package_open(words[2], NULL, NULL, &package), "bad-argument"); /* no init yet */
  check(odtpack_init(base()));
  odtpack_error* refused = odtpack_init(&older);
  if (refused == NULL || strcmp(odtpack_error_message(refused), "ONNX Runtime 1.16.3 is older than 1.17."))
    return 1;
  odtpack_error_release(refused); /* the one before is still there */
  odtpack_disable_telemetry();
  const OrtApi* api = base()->GetApi(17);
  OrtEnv* env = NULL;
  if (api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "c", &env) != NULL) return 1;

  expect(odtpack_package_open("/nowhere", NULL, NULL, &package), "package-not-found");
  check(odtpack_package_open(words[2], NULL, NULL, &package));
  odtpack_text path;
  check(odtpack_package_path(package, "checkpoint", &path));
  odtpack_state* state = NULL;
  check(odtpack_state_load(path.bytes, &state));
  odtpack_free(path.bytes);
  odtpack_session* session = NULL;
  check(odtpack_session_create(env, NULL, 1, package, state, NULL, &session));

  odtpack_spec image;
  if (!odtpack_package_spec(package, ODTPACK_INPUTS, 0, &image)) return 1;
  int64_t shape[32];
  memcpy(shape, image.shape, image.rank * sizeof *shape);
  shape[0] = 8;
  const OrtValue* batch[2];
  batch[0] = tensor(api, words[3], shape, image.rank, image.type, 4);
  batch[1] = tensor(api, words[4], shape, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8);
  const odtpack_schedule endless = {"step", 0, 0, 0, 0, 0.1, NULL, 0};
  const double factor = odtpack_schedule_factor(&endless, 3);
  if (factor == factor) return 1; /* it is NaN */
  const odtpack_schedule linear = {"linear", 2, 12, 0, 0, 0.1, NULL, 0};
  check(odtpack_session_set_schedule(session, &linear, 0.01));
  odtpack_text start;
  odtpack_state* other = NULL;
  check(odtpack_package_path(package, "checkpoint", &start));
  check(odtpack_state_load(start.bytes, &other));
  odtpack_free(start.bytes);
  size_t number = 0, group = 0;
  odtpack_memory* memory = NULL;
  OrtValue* moment = NULL;
  expect(odtpack_state_moment(other, 0, &start, &number, &group, &moment, &memory), "bad-argument");
  expect(odtpack_state_carry_over(state, other, NULL, 0, true), "busy");
  const char* none[1] = {NULL};
  check(odtpack_state_carry_over(other, state, none, 0, false));
  if (odtpack_state_property_count(other) != 0) return 1;
  check(odtpack_state_carry_over(other, state, none, 0, true));
  if (odtpack_state_property_count(other) != 1) return 1; /* the schedule */
  odtpack_state_release(other);
  size_t no_outputs = 0;
  expect(odtpack_session_run(session, (odtpack_run)3, batch, 2, NULL, &no_outputs), "bad-argument");
  pthread_t watcher;
  if (pthread_create(&watcher, NULL, watch, session) != 0) return 1;
  for (int step = 0; step < 12; ++step) {
    double loss = 0;
    check(odtpack_session_train_batch(session, batch, 2, &loss));
    printf("%.17g\n", loss);
    if (step == 5) check(odtpack_state_save(state, words[5], true, true));
  }
  if (pthread_join(watcher, NULL) != 0) return 1;
  OrtValue* outputs[1]; /* of more outputs the first alone is asked for */
  size_t outputs_count = 1;
  check(odtpack_session_run(session, ODTPACK_EVAL_STEP, batch, 2, outputs, &outputs_count));
  float* loss = NULL;
  if (outputs_count != 1 || api->GetTensorMutableData(outputs[0], (void**)&loss) != NULL) return 1;
  printf("%.17g\n", (double)*loss);
  api->ReleaseValue(outputs[0]);
  check(odtpack_state_save(state, words[5], true, true));

  struct evaluation evaluation = {api, session, batch};
  pthread_t thread;
  if (pthread_create(&thread, NULL, evaluate, &evaluation) != 0) return 1;
  read_beside(api, state);
  check(odtpack_session_close(session));
  if (pthread_join(thread, NULL) != 0) return 1;
  check(odtpack_session_close(session));
  expect(odtpack_session_optimizer_step(session), "closed");
  odtpack_session_release(session);
  odtpack_state_release(state);
  odtpack_package_release(package);
  api->ReleaseValue((OrtValue*)batch[0]);
  api->ReleaseValue((OrtValue*)batch[1]);
  api->ReleaseEnv(env);
  return 0;
}
