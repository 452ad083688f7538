"""Names of the streams and buckets on the broker."""

WORK = "MESH_WORK"
TOKENS = "MESH_TOKENS"
DEAD = "MESH_DEAD"
MODELS_BUCKET = "mesh_models"
OBJECTS_BUCKET = "mesh_objects"
MODELS = f"KV_{MODELS_BUCKET}"
OBJECTS = f"OBJ_{OBJECTS_BUCKET}"
