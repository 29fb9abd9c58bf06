//! Ranks that are processes: how they meet, who is turned away, and what becomes of the others when
//! one is killed or stopped.

#[path = "processes/meeting.rs"]
mod processes;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use foveate_shard::collectives::{Collectives, Meeting, connect};
use processes::meeting;

const SOON: Duration = Duration::from_secs(30);

/// Says which rank this process is, where [`as_a_process`] made it.
const ROLE: &str = "FOVEATE_TEST_RANK";

/// This test, again, as the process of a rank.
fn as_a_process(test: &str, rank: usize, at: &Meeting) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(ROLE, format!("{rank} {} {}", at.ranks, at.port))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The meeting of the process, where it is one of [`as_a_process`].
fn role() -> Option<Meeting> {
    let role = std::env::var(ROLE).ok()?;
    let [rank, ranks, port] = role
        .split(' ')
        .map(|n| n.parse::<usize>().unwrap())
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    let silence = Duration::from_secs(3);
    Some(Meeting { rank, port: port as u16, silence, ..meeting(ranks, SOON) })
}

/// Reduces until it fails, and says how.
fn reduce_for_ever(at: &Meeting) {
    let world = connect(at).unwrap();
    let mut turn = 0u64;
    let error = loop {
        let mut values = vec![1.0f32; 100_000];
        match world.all_reduce(&mut values) {
            Ok(()) => assert!(values.iter().all(|&v| v == at.ranks as f32)),
            Err(error) => break error,
        }
        turn += 1;
        if turn == 3 {
            println!("reduces");
        }
    };
    let last = world.history().pop().unwrap();
    assert!(last.ended.is_none(), "the one that failed has not ended");
    assert!(error.is_lost(), "it may be started again");
    println!("told: {error}");
}

/// Starts three processes of `test`, waits until all reduce, does `harm` to rank 1, and gives what
/// the others were told and how long that took.
fn harmed(test: &str, harm: impl FnOnce(&mut Child)) -> ([String; 2], Duration) {
    use std::io::{BufRead, BufReader};
    let at = meeting(3, SOON);
    let mut ranks: Vec<Child> = (0..3).map(|rank| as_a_process(test, rank, &at)).collect();
    let mut outputs: Vec<_> =
        ranks.iter_mut().map(|rank| BufReader::new(rank.stdout.take().unwrap()).lines()).collect();
    let mut until = |rank: usize, what: &str| {
        let line = outputs[rank].find(|line| line.as_ref().is_ok_and(|line| line.contains(what)));
        line.unwrap_or_else(|| panic!("rank {rank} never said {what:?}")).unwrap()
    };
    (0..3).for_each(|rank| drop(until(rank, "reduces")));
    let began = Instant::now();
    harm(&mut ranks[1]);
    let told = [0, 2].map(|rank| until(rank, "told: "));
    let took = began.elapsed();
    for rank in &mut ranks {
        let _ = rank.kill();
        rank.wait().unwrap();
    }
    (told, took)
}

#[test]
fn a_process_that_is_killed_is_noticed_at_once() {
    if let Some(at) = role() {
        return reduce_for_ever(&at);
    }
    let (told, took) =
        harmed("a_process_that_is_killed_is_noticed_at_once", |rank| rank.kill().unwrap());
    for told in &told {
        assert!(told.contains("rank 1 is gone: its connection to rank"), "{told}");
    }
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[cfg(unix)]
#[test]
fn a_process_that_is_stopped_is_noticed_by_its_silence() {
    if let Some(at) = role() {
        return reduce_for_ever(&at);
    }
    let stop = |rank: &mut Child| {
        let stopped = Command::new("kill").args(["-STOP", &rank.id().to_string()]).status();
        assert!(stopped.unwrap().success());
    };
    let (told, took) = harmed("a_process_that_is_stopped_is_noticed_by_its_silence", stop);
    for told in &told {
        assert!(told.contains("rank 1 has been silent to rank"), "{told}");
    }
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(12), "{took:?}");
}

#[test]
fn a_rank_whose_subgroup_lives_on_in_a_thread_has_ended_all_the_same() {
    let at = meeting(2, SOON);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&at).unwrap().all_gather(&[0]).unwrap_err().to_string());
        let second = connect(&Meeting { rank: 1, ..at.clone() }).unwrap();
        std::mem::forget(second.subgroup(&[1]).unwrap());
        let began = Instant::now();
        drop(second);
        let told = first.join().unwrap();
        assert!(
            told.contains("waits for rank 1 in all-gather") && told.contains("has ended"),
            "{told}"
        );
        assert!(began.elapsed() < SOON / 2, "not by the deadline");
    });
}

/// What rank `as_rank` is told when it comes to a meeting, where rank 0 and rank 1 meet after it.
fn turned_away(change: impl FnOnce(Meeting) -> Meeting) -> String {
    let at = meeting(2, SOON);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&at).unwrap().all_gather(&[0]).unwrap());
        let told = connect(&change(Meeting { rank: 1, ..at.clone() })).unwrap_err().to_string();
        let second = connect(&Meeting { rank: 1, ..at.clone() }).unwrap();
        assert_eq!(second.all_gather(&[1]).unwrap(), [[0], [1]]);
        assert_eq!(first.join().unwrap(), [[0], [1]]);
        told
    })
}

#[test]
fn who_does_not_belong_is_turned_away_and_the_meeting_goes_on() {
    let told = turned_away(|m| Meeting { run: 8, ..m });
    assert!(told.contains("another run meets at 127.0.0.1"), "{told}");
    let told = turned_away(|m| {
        // Somebody who says nothing that a rank says, too.
        let mut noise = loop {
            match TcpStream::connect((m.host.as_str(), m.port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        noise.write_all(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n").unwrap();
        Meeting { run: 9, ..m }
    });
    assert!(told.contains("another run"), "{told}");
}

/// A port at which something else listens, which says nothing or hangs up.
#[test]
fn a_rank_that_gets_no_answer_says_what_to_do() {
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let at = Meeting { rank: 1, port, arrival: Duration::from_millis(100), ..meeting(2, SOON) };
    let silent = connect(&at).unwrap_err();
    let hangs_up = std::thread::scope(|scope| {
        scope.spawn(|| (0..2).for_each(|_| drop(other.accept())));
        connect(&at).unwrap_err()
    });
    for (error, why) in
        [(silent, "no answer came in 100ms; "), (hangs_up, "the connection ended (")]
    {
        assert!(error.is_lost(), "started again, the right rank may be there");
        let told = error.to_string();
        let begins = format!("rank 0 did not let rank 1 in at 127.0.0.1:{port}: {why}");
        assert!(told.starts_with(&begins), "{told}");
        assert!(
            told.contains("start each rank once, and give each run a port of its own"),
            "{told}"
        );
    }
}

#[test]
fn ranks_of_an_older_attempt_are_turned_away_and_of_a_newer_one_end_this() {
    let at = Meeting { attempt: 3, ..meeting(2, SOON) };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&at).map(drop));
        let old = Meeting { rank: 1, attempt: 2, ..at.clone() };
        let told = connect(&old).unwrap_err().to_string();
        assert!(told.contains("attempt 3 of this run meets at"), "{told}");
        assert!(told.contains("this is attempt 2"), "{told}");
        let new = scope
            .spawn(|| connect(&Meeting { rank: 1, attempt: 4, ..at.clone() })?.all_gather(&[1]));
        let told = first.join().unwrap().unwrap_err().to_string();
        assert_eq!(told, "attempt 4 of this run has begun, and this is 3");
        let again = connect(&Meeting { attempt: 4, ..at.clone() }).unwrap();
        assert_eq!(again.all_gather(&[0]).unwrap(), [[0], [1]]);
        assert_eq!(new.join().unwrap().unwrap(), [[0], [1]]);
    });
}

#[test]
fn ranks_that_count_otherwise_come_twice_or_not_at_all_are_named() {
    let at = meeting(3, SOON);
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            scope.spawn({
                let at = Meeting { rank, ..at.clone() };
                move || connect(&at)
            })
        });
        let other = connect(&Meeting { rank: 2, ranks: 4, ..at.clone() }).unwrap_err().to_string();
        assert!(other.contains("rank 2 at 127.0.0.1 counts 4 ranks, and rank 0 3"), "{other}");
        for rank in ranks {
            let told = rank.join().unwrap().unwrap_err().to_string();
            // Rank 1 may have come after rank 0 gave up.
            assert!(
                told == other || told.contains("could not reach") || told.contains("let rank 1 in"),
                "{told}"
            );
        }
    });
    let at = meeting(3, SOON);
    std::thread::scope(|scope| {
        let all = [0, 1].map(|rank| {
            scope.spawn({
                let at = Meeting { rank, ..at.clone() };
                move || connect(&at)
            })
        });
        while !all[1].is_finished() && TcpStream::connect((&*at.host, at.port)).is_err() {}
        std::thread::sleep(Duration::from_millis(300));
        let told = connect(&Meeting { rank: 1, ..at.clone() }).unwrap_err().to_string();
        assert_eq!(told, "there is a rank 1 already; start each rank once");
        let last = connect(&Meeting { rank: 2, ..at.clone() });
        assert!(last.is_ok() && all.into_iter().all(|rank| rank.join().unwrap().is_ok()));
    });
    let short = Meeting { arrival: Duration::from_millis(300), ..meeting(4, SOON) };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&short).map(drop));
        let second = connect(&Meeting { rank: 2, ..short.clone() }).unwrap_err();
        let first = first.join().unwrap().unwrap_err();
        assert!(first.is_lost() && second.is_lost(), "started again, they may all come");
        let [first, second] = [first, second].map(|e| e.to_string());
        assert!(first.contains("of 4 ranks [1, 3] did not come to 127.0.0.1"), "{first}");
        assert_eq!(second, first);
    });
    let nobody = Meeting { rank: 1, arrival: Duration::from_millis(300), ..meeting(2, SOON) };
    let told = connect(&nobody).unwrap_err().to_string();
    assert!(told.contains("rank 1 could not reach rank 0 at 127.0.0.1"), "{told}");
    assert!(told.ends_with("start rank 0 there, or give all ranks its address"), "{told}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let told = connect(&Meeting { port, ..meeting(2, SOON) }).unwrap_err().to_string();
    assert!(told.contains("where another program does; choose another port"), "{told}");
    assert!(connect(&Meeting { rank: 2, ..meeting(2, SOON) }).is_err());
}

#[test]
fn a_rank_of_another_version_is_told_so_and_the_meeting_goes_on() {
    let at = meeting(2, SOON);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&at).map(drop));
        let mut other = loop {
            match TcpStream::connect((&*at.host, at.port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut hello = [0; 36];
        hello[..8].copy_from_slice(b"foveate9");
        other.write_all(&hello).unwrap();
        let mut answer = Vec::new();
        other.read_to_end(&mut answer).unwrap();
        let said = String::from_utf8_lossy(&answer[5..]);
        assert_eq!((answer[0], said.contains("another version of foveate")), (1, true), "{said}");
        assert!(connect(&Meeting { rank: 1, ..at.clone() }).is_ok());
        assert!(first.join().unwrap().is_ok());
    });
}

/// Says hello as a rank does, and waits for no answer.
fn says_hello(at: &Meeting) -> TcpStream {
    let mut stream = loop {
        match TcpStream::connect((&*at.host, at.port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut hello = b"foveate2".to_vec();
    hello.extend([at.run, at.attempt].iter().flat_map(|word| word.to_le_bytes()));
    hello.extend([at.rank, at.ranks].iter().flat_map(|&n| (n as u32).to_le_bytes()));
    hello.extend([0; 4]);
    stream.write_all(&hello).unwrap();
    stream
}

/// A pod that is started again comes while the connection of the one before is still held.
#[test]
fn a_rank_that_is_started_again_takes_the_place_of_the_one_that_died() {
    let at = Meeting { silence: Duration::from_secs(5), ..meeting(3, SOON) };
    let of = |rank| Meeting { rank, ..at.clone() };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&of(0)).unwrap().all_gather(&[0]).unwrap());
        // The host of one rank 1 is gone without a word, the process of the next has ended.
        let silent = says_hello(&of(1));
        drop(says_hello(&of(1)));
        let last = scope.spawn(|| connect(&of(2)).unwrap().all_gather(&[2]).unwrap());
        std::thread::sleep(Duration::from_millis(300));
        assert!(!first.is_finished() && !last.is_finished(), "nobody is rank 1");
        let second = connect(&of(1)).unwrap().all_gather(&[1]).unwrap();
        for came in [first.join().unwrap(), second, last.join().unwrap()] {
            assert_eq!(came, [[0], [1], [2]]);
        }
        drop(silent);
    });
    // Of those who came all are there but one who has ended: its successor is waited for.
    let at = meeting(2, SOON);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&at).unwrap().all_gather(&[0]).unwrap());
        drop(says_hello(&Meeting { rank: 1, ..at.clone() }));
        std::thread::sleep(Duration::from_millis(300));
        let second = connect(&Meeting { rank: 1, ..at.clone() }).unwrap().all_gather(&[1]).unwrap();
        assert_eq!(second, [[0], [1]]);
        assert_eq!(first.join().unwrap(), second);
    });
}
