// Command kubernetes is etcd, the control plane, the kubelet and kubectl in one binary; the first argument picks one.
//
// One link instead of six: the parts share almost all of their packages, so this halves the cold build of the cluster tests
// and the space it takes. Built by tests/real_node/rig/build.py; started by tests/real_node/rig/inside.py.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

const usage = "usage: kubernetes etcd|apiserver|controller-manager|scheduler|kubelet|kubectl [flags]"

// command returns the cobra command of a part, or nil when there is no part of that name.
func command(part string) *cobra.Command {
	switch part {
	case "apiserver":
		return apiserver.NewAPIServerCommand()
	case "controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	}
	return nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	part := os.Args[1]
	os.Args = os.Args[1:] // every part parses its own flags and takes its name from here
	if part == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	chosen := command(part)
	if chosen == nil {
		fmt.Fprintf(os.Stderr, "kubernetes: no part named %q\n%s\n", part, usage)
		os.Exit(2)
	}
	os.Exit(cli.Run(chosen))
}
