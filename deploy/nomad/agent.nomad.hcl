# Serai's agent on every GPU client of Nomad. It reads GPUs and prepares slices; Nomad runs the containers.
# It runs as a plain process (raw_exec) since it starts MPS daemons and reads the processes on the GPUs of its machine.
variable "etcd" { default = "http://127.0.0.1:2379" }

job "serai-agent" {
  type = "system"
  constraint {
    attribute = "${node.class}"
    value     = "gpu"
  }

  group "agent" {
    task "agent" {
      driver = "raw_exec"
      config {
        command = "/opt/serai/bin/serai"
        args = ["agent", "--node", "${node.unique.name}", "--etcd", var.etcd,
        "--engine-node-id", "${node.unique.id}", "--data-folder", "/var/lib/serai"]
      }
      resources {
        cpu    = 200
        memory = 256
      }
    }
  }
}
