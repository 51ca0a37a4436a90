# Serai's coordinators as a Nomad service; two, on different machines. nomad job run coordinator.nomad.hcl
variable "etcd" { default = "http://127.0.0.1:2379" }
variable "image" { default = "serai:0.1.0" }

job "serai-coordinator" {
  type = "service"

  group "coordinator" {
    count = 2
    constraint { distinct_hosts = true }

    network {
      mode = "host"
      port "api" { static = 8765 }
    }

    task "coordinator" {
      driver = "docker"
      config {
        image        = var.image
        network_mode = "host"
        args = ["coordinator", "--etcd", var.etcd, "--listen", "0.0.0.0:8765", "--engine", "nomad",
        "--nomad", "http://127.0.0.1:4646"]
      }
      # A token with list-jobs, read-job, submit-job and read-logs on the namespace, and read on node.
      template {
        destination = "secrets/nomad.env"
        env         = true
        data        = "{{ with nomadVar \"nomad/jobs/serai-coordinator\" }}NOMAD_TOKEN={{ .token }}{{ end }}"
      }
      kill_timeout = "15s"
      resources {
        cpu    = 1000
        memory = 1024
      }
    }
  }
}
