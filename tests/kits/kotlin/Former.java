import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.HashMap;
import java.util.Map;
import org.odtpack.OdtpackException;
import org.odtpack.OrtCheckpointState;
import org.odtpack.OrtTrainingSession;

/** A program for ONNX Runtime's training API of 1.19, of which only imports and one call changed. */
public class Former {
    private static ByteBuffer read(String path) throws IOException {
        return ByteBuffer.wrap(Files.readAllBytes(Paths.get(path))).order(ByteOrder.nativeOrder());
    }

    public static void main(String[] arguments) throws IOException, OrtException {
        String folder = arguments[0];
        Path saved = Paths.get(arguments[1], "former.ckpt");
        OrtEnvironment env = OrtEnvironment.getEnvironment();
        OrtSession.SessionOptions options = new OrtSession.SessionOptions();
        options.setIntraOpNumThreads(1);
        options.setOptimizationLevel(OrtSession.SessionOptions.OptLevel.EXTENDED_OPT);
        options.setMemoryPatternOptimization(false);
        try (OrtTrainingSession session = OrtTrainingSession.createTrainingSession(
                env, folder + "/checkpoint", folder + "/training_model.onnx",
                folder + "/eval_model.onnx", folder + "/optimizer_model.onnx", options)) {
            Map<String, OnnxTensor> inputs = new HashMap<>();
            inputs.put("input", OnnxTensor.createTensor(
                env, read(arguments[2]).asFloatBuffer(), new long[] {8, 1, 8, 8}));
            inputs.put("labels", OnnxTensor.createTensor(
                env, read(arguments[3]).asLongBuffer(), new long[] {8}));
            if (!session.getTrainInputNames().equals(inputs.keySet())) {
                throw new IllegalStateException(session.getTrainInputNames().toString());
            }
            for (int step = 0; step < 5; step++) {
                try (OrtSession.Result result = session.trainStep(inputs)) {
                    System.out.println((double) (float) result.get(0).getValue());
                }
                session.optimizerStep();
                session.lazyResetGrad();
            }
            session.addProperty("epoch", 3);
            session.addProperty("note", "one training");
            session.addProperty("share", 0.25f);
            check(session.getIntProperty("epoch") == 3 && session.getLearningRate() == 0.001f);
            session.saveCheckpoint(saved, true);

            session.registerLinearLRScheduler(10, 100, 0.5f);
            session.optimizerStep();
            session.schedulerStep();
            check(session.getLearningRate() == 0.5f * 6 / 10);
            try (OrtSession.Result result = session.evalStep(inputs)) {
                check(Float.isFinite((float) result.get("loss").get().getValue()));
            }
            String[] outputs = {"output"};
            session.exportModelForInference(Paths.get(arguments[1], "former.onnx"), outputs);
            inputs.remove("labels");
            try {
                session.trainStep(inputs);
                check(false);
            } catch (OdtpackException error) {
                check(error.getErrorCode().equals("input-count"));
            }
        }
        OrtCheckpointState fresh = OrtCheckpointState.loadCheckpoint(folder + "/checkpoint");
        OrtCheckpointState.carryOver(OrtCheckpointState.loadCheckpoint(saved), fresh);
        fresh.saveCheckpoint(Paths.get(arguments[1], "carried.ckpt"), true);
    }

    private static void check(boolean good) {
        if (!good) throw new IllegalStateException();
    }
}
