//! The command line: what can be asked for, and the help. Called by `main`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use forestvpn_quantum::Mss;

use crate::ifname;

const EXAMPLES: &str = "\
Examples:
  fv genkey | tee private.key | fv pubkey
      Make a key pair: the private key in a file, the public key on the screen.
  fv wg0
      Make the interface wg0 and go on in the background. Set it up with `wg` and `ip`;
      `ip link delete wg0` ends it.
  WG_QUICK_USERSPACE_IMPLEMENTATION=fv wg-quick up wg0
      Let wg-quick do all of that, from /etc/wireguard/wg0.conf.
  fv up wg0
      The same in one process, without wg-quick: stays in the foreground, undone at its end.
  fv show
      What every tunnel on this machine is doing.
  fv doctor
      What this machine gives a tunnel, and what is missing. `fv doctor wg0`: what the running
      wg0 has in use, what it counted, and what looks wrong.
  fv health
      Whether the peers still talk, as an exit code: for health checks and scripts.

Environment:
  LOG_LEVEL     silent, error (the default), info, debug or verbose; lines go to standard error
  WG_THREADS    as --threads
  FV_METRICS, FV_MSS, FV_ROUTE_FROM
                as --metrics, --mss and --route-from
  WG_PROCESS_FOREGROUND=1
                as --foreground
  WG_TUN_FD, WG_UAPI_FD
                numbers of descriptors that are open already: a TUN device, a listening
                control socket
  FV_NO_OFFLOAD what not to use, though it would be faster: a list of tun, tun-gro, udp-gso,
                udp-gro, cipher, or all
  FV_OFFLOAD    what to use though it is off by default: tun-udp-gro
  FV_INTERFACE, FV_PRIVATE_KEY, FV_ADDRESS, FV_LISTEN_PORT, FV_MTU, FV_DNS, FV_TABLE, FV_FWMARK,
  FV_PEER_PUBLIC_KEY, _PRESHARED_KEY, _ENDPOINT, _ALLOWED_IPS, _PERSISTENT_KEEPALIVE, FV_PEER2_…
                the tunnel of `fv up` without FILE [FV_INTERFACE: wg0]; a name that ends in _KEY may
                have _FILE behind it, and is read from there
  FV_STATE      a folder in which `fv up` remembers the time of the last handshake: a machine that
                starts with its clock in the past is not refused then (or STATE_DIRECTORY)
  FV_CLOCK_WAIT seconds to wait for such a clock to be set [default: 60]
  NOTIFY_SOCKET as systemd sets it, for Type=notify";

/// A WireGuard tunnel in one process, without a kernel module.
///
/// With an interface name it makes that interface and serves it until it is deleted; `wg` and wg-quick set it
/// up as they do a kernel interface.
#[derive(Debug, Parser)]
#[command(
    name = "fv",
    version,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    /// Name of the interface to make: 1 to 15 bytes, such as wg0
    #[arg(value_name = "IFNAME", required = true, value_parser = interface)]
    pub(crate) ifname: Option<String>,

    /// Stay in the foreground instead of going on in the background
    #[arg(short, long)]
    pub(crate) foreground: bool,

    #[command(flatten)]
    pub(crate) extras: Extras,

    /// We are the process in the background; standard output is the pipe to the one that waits.
    #[arg(long, hide = true)]
    pub(crate) in_background: bool,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// What `fv` does instead of making an interface.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what tunnels are doing: peers, addresses, last handshakes, traffic
    Show {
        /// Only this interface [default: all that have a control socket]
        #[arg(value_name = "IFNAME", value_parser = interface)]
        ifname: Option<String>,
        /// For programs: a list of interfaces as JSON; times in seconds since 1970, sizes in bytes
        #[arg(long)]
        json: bool,
    },
    /// Bring up the tunnel that a wg-quick file describes, all by itself, until Ctrl-C or SIGTERM
    ///
    /// Makes the interface, sets its key, peers, addresses, MTU, routes, rules and DNS, runs its hooks, and undoes all
    /// of it at the end. Needs neither wg-quick nor iproute2. Two things differ from wg-quick: it adds no packet filter
    /// rules, and SaveConfig is not done.
    Up {
        /// NAME.conf, called after its interface; or only NAME, for /etc/wireguard/NAME.conf; without it, the
        /// environment: FV_PRIVATE_KEY, FV_ADDRESS, FV_PEER_PUBLIC_KEY, …
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Ends when standard input is closed, and writes its counters to standard output then.
        #[arg(long, hide = true)]
        for_demo: bool,
        #[command(flatten)]
        extras: Extras,
        /// For a router: send what comes in by this interface through the tunnel, and switch on forwarding; nothing
        /// else gets a default route. auto: the interface of the default route [env: FV_ROUTE_FROM]
        #[arg(long, value_name = "auto|IFNAME", value_parser = interface)]
        route_from: Option<String>,
    },
    /// Try it out: make two ends and a tunnel between them, ping, move data, print figures, clean up
    ///
    /// Changes nothing on this machine and needs no other program. As an ordinary user it works where user namespaces
    /// are allowed and /dev/net/tun may be opened; otherwise it says what is missing and runs both ends in memory.
    Demo {
        /// How much to move through the tunnel, both directions together
        #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=10_000))]
        megabytes: u64,
        /// Use no TUN device: both ends in memory, over UDP on 127.0.0.1
        #[arg(long)]
        no_tun: bool,
    },
    /// Say what this machine gives a tunnel, or what a running tunnel has in use and what looks wrong
    ///
    /// Without IFNAME it tries everything out on an interface of its own, which it takes away again; the exit code is
    /// 0 when a tunnel can run here. With IFNAME it asks the running fv, and the exit code is 0 when that answers.
    Doctor {
        /// The interface of a running fv
        #[arg(value_name = "IFNAME", value_parser = interface)]
        ifname: Option<String>,
        /// For programs: the same as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say whether each peer that should be talking had a handshake lately; the exit code is 0 when all had
    ///
    /// Without --max-age a peer must talk when it has a PersistentKeepalive: its last handshake may be three minutes
    /// and one keepalive old. A tunnel that is down, or that is not there, is not healthy.
    Health {
        /// Only this interface [default: all that have a control socket]
        #[arg(value_name = "IFNAME", value_parser = interface)]
        ifname: Option<String>,
        /// Every peer must have had a handshake within so many seconds, with keepalive or without
        #[arg(long, value_name = "SECONDS")]
        max_age: Option<u64>,
        /// For programs: the same as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a new private key
    Genkey,
    /// Read a private key and print the public key that belongs to it
    Pubkey,
    /// Print a new preshared key, a secret that two peers share beside their key pairs
    Genpsk,
    /// Write manual pages and shell completions into a folder, for packages
    #[command(hide = true)]
    Manual {
        /// The folder
        folder: PathBuf,
    },
}

/// What a tunnel may do besides carrying packets by one thread; all of it is off unless asked for.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Extras {
    /// Threads that carry packets: 2 is one for each direction, N is one inward and N - 1 outward
    /// [env: WG_THREADS] [default: 1]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<u16>,
    /// Counters for Prometheus at http://ADDRESS:PORT/metrics; they name peers and their addresses, so keep it to
    /// 127.0.0.1 or a network of your own [env: FV_METRICS] [default: off]
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = listen_address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// The largest TCP segment that connections through the tunnel may agree on, for a router between networks:
    /// auto (what fits the tunnel's MTU) or a number of bytes [env: FV_MSS] [default: off]
    #[arg(long, value_name = "auto|BYTES", value_parser = mss)]
    pub(crate) mss: Option<Mss>,
}

impl Extras {
    /// What is asked for, by the command line or else by the environment.
    ///
    /// # Errors
    /// A variable has a value that its option would not take.
    pub(crate) fn or_environment(&self) -> Result<Self, String> {
        Ok(Self {
            threads: given(self.threads, "WG_THREADS", thread_count)?,
            metrics: given(self.metrics, "FV_METRICS", listen_address)?,
            mss: given(self.mss, "FV_MSS", mss)?,
        })
    }

    /// The same as words of a command line.
    pub(crate) fn words(&self) -> Vec<String> {
        let mss = self.mss.map(|mss| match mss {
            Mss::Off => "--mss=off".to_owned(),
            Mss::Auto => "--mss=auto".to_owned(),
            Mss::Most(bytes) => format!("--mss={bytes}"),
        });
        let threads = self.threads.map(|count| format!("--threads={count}"));
        let metrics = self.metrics.map(|address| format!("--metrics={address}"));
        [threads, metrics, mss].into_iter().flatten().collect()
    }
}

/// The interface whose packets are passed on, by the command line or else by FV_ROUTE_FROM.
///
/// # Errors
/// The variable names no interface.
pub(crate) fn route_from(option: Option<&String>) -> Result<Option<String>, String> {
    given(option.cloned(), "FV_ROUTE_FROM", interface)
}

/// The option's value, or else that of the environment variable; an empty one is none.
fn given<T>(
    option: Option<T>,
    variable: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    if option.is_some() {
        return Ok(option);
    }
    let Some(word) = std::env::var(variable).ok().filter(|word| !word.is_empty()) else {
        return Ok(None);
    };
    let problem = |allowed| format!("{variable}={}: {allowed}", crate::uapi::shown(&word));
    read(&word).map(Some).map_err(problem)
}

fn listen_address(word: &str) -> Result<SocketAddr, String> {
    word.parse().map_err(|_| "an address with a port, such as 127.0.0.1:9586 or [::1]:9586".to_owned())
}

fn mss(word: &str) -> Result<Mss, String> {
    match word.to_ascii_lowercase().as_str() {
        "off" => Ok(Mss::Off),
        "auto" => Ok(Mss::Auto),
        number => number
            .parse()
            .ok()
            .filter(|bytes| (64..=65_495).contains(bytes))
            .map(Mss::Most)
            .ok_or_else(|| "auto, off, or 64 to 65495 bytes".to_owned()),
    }
}

/// More would only wait for each other.
const MAX_THREADS: u16 = 64;

fn thread_count(word: &str) -> Result<u16, String> {
    let fits = |count: &u16| (1..=MAX_THREADS).contains(count);
    word.parse()
        .ok()
        .filter(fits)
        .ok_or_else(|| format!("a number of threads is 1 or more, up to {MAX_THREADS}"))
}

/// What to say when `name` is a command with a slip of the finger, and not the name of an interface.
///
/// A name with a digit is an interface's. So is any word of one or two letters: people call tunnels "us".
pub(crate) fn mistyped(name: &str) -> Option<String> {
    if name.contains(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let word = name.to_ascii_lowercase();
    let close = |command: &&&str| {
        let most = match command.len() {
            0..=2 => 0,
            3..=4 => 1,
            _ => 2,
        };
        distance(&word, command) <= most
    };
    let meant = ["show", "up", "demo", "doctor", "health", "genkey", "pubkey", "genpsk"];
    let command = meant.iter().filter(close).min_by_key(|command| distance(&word, command))?;
    Some(format!(
        "did you mean `fv {command}`? To make an interface that is called {name}: `fv -f -- {name}`, or without \
         -f for the background"
    ))
}

/// Letters to add, leave out, change, or swap with their neighbour until one word is the other.
fn distance(one: &str, other: &str) -> usize {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut rows = vec![(0..=other.len()).collect::<Vec<usize>>()];
    for (i, a) in one.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in other.iter().enumerate() {
            let mut least = (rows[i][j] + usize::from(a != b)).min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && one[i - 1] == *b && *a == other[j - 1] {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}

fn interface(name: &str) -> Result<String, String> {
    ifname::check(name)
        .map(|()| name.to_owned())
        .map_err(|reason| format!("this cannot be an interface: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("fv").chain(line.split_whitespace()))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_forms_that_wireguard_go_and_boringtun_know_are_read() {
        assert!(!parse("wg0").expect("valid").foreground);
        for line in ["-f wg0", "--foreground wg0", "wg0 -f"] {
            let cli = parse(line).expect(line);
            assert!(cli.foreground && cli.ifname.as_deref() == Some("wg0"), "{line}");
        }
        assert_eq!(parse("--threads 4 -f wg0").expect("valid").extras.threads, Some(4));
    }

    #[test]
    fn an_interface_may_be_called_like_a_command() {
        assert_eq!(parse("-f -- show").expect("valid").ifname.as_deref(), Some("show"));
        assert!(matches!(parse("show").expect("valid").command, Some(Command::Show { .. })));
    }

    #[test]
    fn a_mistyped_command_is_known_as_one_and_names_of_interfaces_are_not() {
        for (typed, meant) in [
            ("genky", "genkey"),
            ("gnekey", "genkey"),
            ("pubkye", "pubkey"),
            ("genpks", "genpsk"),
            ("shwo", "show"),
            ("shows", "show"),
            ("Up", "up"),
            ("dmeo", "demo"),
            ("docter", "doctor"),
            ("helth", "health"),
        ] {
            let text = mistyped(typed).unwrap_or_else(|| panic!("{typed} passes"));
            assert!(text.starts_with(&format!("did you mean `fv {meant}`? ")), "{text}");
            assert!(text.contains(&format!("`fv -f -- {typed}`")), "{text}");
        }
        for name in ["wg0", "tun0", "up0", "demo1", "us", "eu", "vpn", "home", "office", "wg-demo", "keys"] {
            assert_eq!(mistyped(name), None, "{name}");
        }
    }

    #[test]
    fn the_words_that_are_looked_for_are_all_commands() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name().to_uppercase();
            assert!(mistyped(&name).is_some(), "{name}");
        }
    }

    #[test]
    fn up_takes_threads_too() {
        let Some(Command::Up { extras, .. }) = parse("up --threads 2 wg0").expect("valid").command else {
            panic!("not up");
        };
        assert_eq!(extras.threads, Some(2));
    }

    #[test]
    fn what_is_asked_for_besides_reaches_the_process_in_the_background_as_it_was_said() {
        for words in ["--metrics=127.0.0.1:9586 --mss=auto", "--metrics=[::1]:1 --mss=1360", "--mss=off"] {
            let cli = parse(&format!("{words} wg0")).expect("valid");
            assert_eq!(cli.extras.words().join(" "), words);
        }
        for words in ["--mss 63", "--mss 65496", "--mss x", "--metrics 9586", "--metrics localhost:9586"] {
            assert!(parse(&format!("{words} wg0")).is_err(), "{words}");
        }
    }

    #[test]
    fn show_takes_a_name_and_a_form() {
        let Some(Command::Show { ifname, json }) = parse("show wg0 --json").expect("valid").command else {
            panic!("not show");
        };
        assert!(json && ifname.as_deref() == Some("wg0"));
    }

    #[test]
    fn f72_a_name_that_no_interface_can_have_is_refused_with_the_cause() {
        for (line, part) in
            [("abcdefghijklmnop", "16 bytes"), ("a/b", "a /"), ("-f ..", "kernel"), ("show a/b", "a /")]
        {
            let text = parse(line).expect_err(line).to_string();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn nothing_nonsense_and_contradictions_are_refused() {
        for line in
            ["", "wg0 wg1", "--threads 0 wg0", "--threads x wg0", "--threads -1 wg0", "--nonsense wg0"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
